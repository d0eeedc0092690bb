"""The least time between two layers, given that each parameter is gathered as a whole or not at all.

[Note: Why it is a bound]
Symbols: ``free_bytes`` is what the limit of device memory leaves next to the earlier layer; ``S`` are the parameters of
the later layer that are whole, or on their way, while the earlier one computes.

1. A parameter lies in one group, and a group counts with all of its bytes from its issue on. So the bytes of ``S`` are
   at most ``free_bytes``.
2. The other parameters are issued after the earlier layer has ended, each over one link. A link takes at least
   :meth:`LinkRates.least_alone_us` for ``n`` bytes, and longer while the other link is busy.
3. So the time between the layers is at least the minimum over all ``S`` and all ways to spread the other parameters
   over the links. Small parameters beyond :data:`LISTED` are left out, which can only lower the minimum.
"""

from collections.abc import Sequence
from functools import cache
from math import inf

from megatron_ext.bounds.link_rates import LinkRates
from megatron_ext.workload.route import ALL_GATHER, HOST_COPY, kind_of

LISTED = 7
"""The number of parameters of a layer that are considered, the largest first."""


class LeastWait:
    """The least microseconds from the end of a layer to the start of the rank's next layer; see the note above.

    Args:
        rates: the rank's links.
    """

    def __init__(self, rates: LinkRates):
        self.rates, self._known, self._alone_us = rates, cache(self._least), cache(rates.least_alone_us)

    def __call__(self, free_bytes: int, sizes: Sequence[int]) -> float:
        """``free_bytes``: what the limit leaves next to the earlier layer; ``sizes``: the later layer's parameters."""
        rates = self.rates
        if sum(sizes) <= free_bytes or not rates.routes:
            return 0.0
        if HOST_COPY not in rates.routes and any(kind_of(route).staged for route in rates.routes):
            return 0.0  # the drive is no bound for groups that are already in staging slots
        return self._known(free_bytes, tuple(sorted(sizes, reverse=True)[:LISTED]))

    def _least(self, free_bytes: int, sizes: tuple[int, ...]) -> float:
        routes = self.rates.best_rates
        ways = {(0, 0, 0)}  # (bytes that stay, bytes that are gathered, bytes that are copied)
        for size in sizes:
            found = {(stay + size, a, b) for stay, a, b in ways if stay + size <= free_bytes}
            if ALL_GATHER in routes:
                found |= {(stay, a + size, b) for stay, a, b in ways}
            if HOST_COPY in routes:
                found |= {(stay, a, b + size) for stay, a, b in ways}
            ways = found
        slower = [1.0 + self.rates.excess.get(pair, 0.0) for pair in ((ALL_GATHER, HOST_COPY), (HOST_COPY, ALL_GATHER))]
        together = 1.0 / slower[0] + 1.0 / slower[1] - 1.0
        best = inf
        for _, a, b in ways:
            gather_us, copy_us = self._alone_us(ALL_GATHER, a), self._alone_us(HOST_COPY, b)
            both = min(gather_us * slower[0], copy_us * slower[1]) if together > 0 else 0.0
            best = min(best, gather_us + copy_us - both * together)
        return best
