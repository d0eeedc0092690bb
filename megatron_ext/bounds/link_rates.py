"""The least time in which the links of one rank can bring some bytes.

[Note: Why it is the least]
1. In ``t`` microseconds a link brings at most ``t`` times the best rate of any gather that is no larger than a group
   can be and takes no longer than ``t``.
2. Links that run at the same time lose at least the least slowdown that the table says. Bytes and time are both linear
   in how long each set of links runs, so one fixed set of links is best.
3. A group that comes for the first time over a link of host copies was published before, at no better than publishing's
   best rate. For ``y`` such bytes both publishing and the link have moved at least ``y`` bytes. So ``q`` times the
   bytes published plus ``1 - q`` times the bytes over the link is at least ``y`` too, for any ``q`` from 0 to 1. With
   these weights all links and publishing run at the same time as in 2. The smallest rate over several ``q`` counts.

[Note: Whole parameters]
Between two layers each parameter is gathered as a whole or not at all. Symbols: ``free_bytes`` is what the limit of
device memory leaves next to the earlier layer; ``S`` are the parameters of the later layer that are whole, or on their
way, while the earlier one computes.

1. A parameter lies in one group, and a group counts with all of its bytes from its issue on. So the bytes of ``S`` are
   at most ``free_bytes``.
2. The other parameters are issued after the earlier layer has ended, each over one link. A link takes at least
   :meth:`LinkRates.least_alone_us` for ``n`` bytes, and longer while the other link is busy.
3. So the time between the layers is at least the minimum over all ``S`` and all ways to spread the other parameters
   over the links. Small parameters beyond :data:`LISTED` are left out, which can only lower the minimum.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import chain, combinations, permutations
from math import inf

from megatron_ext.bounds.feasibility import usable_routes
from megatron_ext.cost.curve import points_of
from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.activity_kinds import CPU, NVME, PUBLISH, link_of
from megatron_ext.simulator.timing import PADDING_SHARE, Timing
from megatron_ext.workload.bucket_rules import buckets
from megatron_ext.workload.route import ALL_GATHER, HOST_COPY, kind_of
from megatron_ext.workload.workload import Chunk, Workload, group_bytes

PARTS_OF_PUBLISHING = (1.0, 0.75, 0.5, 0.25)
"""Values of ``q`` in the note, in addition to 0."""

LISTED = 7
"""The number of parameters of a layer that are considered, the largest first."""

MOST_DOUBLINGS = 256
"""Enough doublings to get from the shortest time that plausible costs allow to the longest. With times of 1e-12 to
1e13 us, sizes up to 2**50 bytes and slowdowns up to 1e6 their ratio is less than 2**210."""


class LinkRates:
    """What the links of one rank can bring at best; see the note above.

    Attributes:
        routes: routes that are offered, allowed by the limits, and have points.
        best_rate: bytes per microsecond of the best set of links.
    """

    def __init__(self, workload: Workload, timing: Timing, pp_rank: int):
        largest = largest_group(workload, workload.chunks_of_rank(pp_rank))
        offered = usable_routes(workload, timing)  # cpu_shard is no faster: it uses two links, one for all-gathers
        self.timing = timing
        self.least_us = cache(self._least_us)  # stages and micro-batches ask for the same sizes
        self.least_alone_us, self._known_waits = cache(self._least_alone_us), cache(self._least_wait_us)
        self.curves = {route: _points(timing, route, largest) for route in offered}
        self.routes = tuple(route for route in offered if self.curves[route])
        # A group with one rank may come from its shard in host memory, as fast as a host copy, without being published.
        whole = workload.zero_stage == 3 and 1 in (workload.parallel.dp, workload.parallel.expert_dp)
        self.publishing = {
            route: _publish_points(timing, pp_rank, copy, largest)
            for route in self.routes
            if (copy := kind_of(route).copy) is not None and not (whole and kind_of(route).reads_host_copy)
        }
        # A gather occupies the link of its last leg, or the drive and PCIe if it is staged.
        kinds = {route: (NVME, CPU) if kind_of(route).staged else (link_of(route),) for route in self.routes}
        kinds["publish"] = (PUBLISH,)
        self.excess = {(a, b): self._least_excess(kinds[a], kinds[b]) for a, b in permutations(kinds, 2)}
        self.best_rates = {route: max(size / us for size, us in self.curves[route]) for route in self.routes}
        self.best_rate = max(self._together(self.best_rates)) if self.routes else 0.0

    def _least_excess(self, measured: tuple[int, ...], busy: tuple[int, ...]) -> float:
        return min(self.timing.slowdowns.least_excess(a, b) for a in measured for b in busy)

    @cached_property
    def _sets(self) -> list[dict[str, float]]:
        """Sets of links that can be busy at once, with the factor by which the others of the set slow each link.

        ``cpu`` and ``nvme`` end on the same PCIe link, so no set has both.
        """
        chosen = chain.from_iterable(combinations(self.routes, number + 1) for number in range(len(self.routes)))
        return [self._slowed(links) for links in chosen if len({*map(link_of, links)}) == len(links)]

    @cached_property
    def _sets_with_publishing(self) -> list[dict[str, float]]:
        return [*self._sets, *(self._slowed((*links, "publish")) for links in [(), *self._sets])]

    def _slowed(self, links: tuple[str, ...]) -> dict[str, float]:
        return {a: 1.0 + sum(self.excess[a, b] for b in links if b != a) for a in links}

    def _together(self, rates: dict[str, float]) -> Iterator[float]:
        """Bytes per microsecond of every set of links, the largest sets first. Publishing is one of the links if it has
        a rate."""
        sets = self._sets_with_publishing if "publish" in rates else self._sets
        return (sum([rates[link] / slowed for link, slowed in links.items()]) for links in reversed(sets))

    def _least_us(self, size: float, *, first: bool = False) -> float:
        """No time shorter than this brings ``size`` bytes. With ``first``, none of these bytes has come before."""
        return least_enough(size / self.best_rate, lambda us: self._brings(us, size, first), halvings=24)

    def _least_alone_us(self, route: str, size: float) -> float:
        """No time shorter than this brings ``size`` bytes by ``route`` alone. No single gather takes longer than it."""
        if not size:
            return 0.0
        points = self.curves[route]
        start = size / self.best_rates[route]
        return least_enough(start, lambda us: us * _best_rate_within(points, us) >= size, halvings=20)

    def least_wait_us(self, free_bytes: int, sizes: Sequence[int]) -> float:
        """The least time from the end of a layer to the start of the rank's next layer; see [Note: Whole parameters].

        Args:
            free_bytes: what the limit leaves next to the earlier layer.
            sizes: bytes of the later layer's parameters.
        """
        if sum(sizes) <= free_bytes or not self.routes:
            return 0.0
        if HOST_COPY not in self.routes and any(kind_of(route).staged for route in self.routes):
            return 0.0  # the drive is no bound for groups that are already in staging slots
        return self._known_waits(free_bytes, tuple(sorted(sizes, reverse=True)[:LISTED]))

    def _least_wait_us(self, free_bytes: int, sizes: tuple[int, ...]) -> float:
        ways = {(0, 0, 0)}  # (bytes that stay, bytes that are gathered, bytes that are copied)
        for size in sizes:
            found = {(stay + size, a, b) for stay, a, b in ways if stay + size <= free_bytes}
            if ALL_GATHER in self.best_rates:
                found |= {(stay, a + size, b) for stay, a, b in ways}
            if HOST_COPY in self.best_rates:
                found |= {(stay, a, b + size) for stay, a, b in ways}
            ways = found
        slower = [1.0 + self.excess.get(pair, 0.0) for pair in ((ALL_GATHER, HOST_COPY), (HOST_COPY, ALL_GATHER))]
        together = 1.0 / slower[0] + 1.0 / slower[1] - 1.0
        best = inf
        for _, a, b in ways:
            gather_us, copy_us = self.least_alone_us(ALL_GATHER, a), self.least_alone_us(HOST_COPY, b)
            both = min(gather_us * slower[0], copy_us * slower[1]) if together > 0 else 0.0
            best = min(best, gather_us + copy_us - both * together)
        return best

    def _brings(self, us: float, size: float, first: bool) -> bool:
        rates = {route: _best_rate_within(self.curves[route], us) for route in self.routes}
        if not any(us * rate >= size for rate in self._together(rates)):
            return False
        if not first or not any(self.publishing.values()):
            return True
        fastest = max(_best_rate_within(points, us) for points in self.publishing.values() if points)
        for part in PARTS_OF_PUBLISHING:  # a group is published first, then it comes
            left = {route: rate * (1.0 - part if self.publishing.get(route) else 1.0) for route, rate in rates.items()}
            if not any(us * rate >= size for rate in self._together(left | {"publish": part * fastest})):
                return False
        return True


def largest_group(workload: Workload, chunks: tuple[Chunk, ...]) -> int:
    """Bytes of the largest group that these chunks can have: at most a bucket, and at most what the device may have."""
    largest = max((group_bytes(part, workload.parallel) for chunk in chunks for part in buckets(chunk)), default=0)
    limit = workload.streamed_bytes
    return largest if limit is None else min(largest, limit)


def best_rate_sizes(measured: set[int], largest: int) -> set[int]:
    """Sizes at which a group of at most ``largest`` bytes can have its best rate.

    A curve is linear between measured sizes, so the best rate is at a measured size, at the largest group, or at the
    largest group that padding may carry past the measured sizes.
    """
    slack = max(measured, default=0) * PADDING_SHARE // (PADDING_SHARE - 1)
    return {size for size in (*measured, largest, slack) if 0 < size <= largest}


def least_enough(start: float, enough: Callable[[float], bool], *, halvings: int) -> float:
    """A time that is not enough (or ``start``), close below the least time that is ``enough``. Doubling ``start`` finds
    the first time that is enough. Then ``halvings`` bisections narrow the interval from the time before it."""
    low = high = start
    for _ in range(MOST_DOUBLINGS):
        if enough(high):
            break
        low, high = high, high * 2
    else:
        raise AssertionError(f"{high} us are not enough for the bytes: a cost is outside the plausible range")
    for _ in range(halvings if low < high else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def _points(timing: Timing, route: str, largest: int) -> list[tuple[float, float]]:
    """(bytes, us) at which a gather by ``route`` can have its best rate: the measured points up to
    the largest group, and that group."""
    curves = [getattr(own.table.routes, kind_of(route).curve) for own in timing.kinds]
    sizes = {point.size_bytes for curve in curves for point in points_of(curve) if point.size_bytes > 0}
    return _least(timing, best_rate_sizes(sizes, largest), lambda own, size: own.fastest_us(route, size))


def _least(timing: Timing, sizes: set[int], us_of: Callable[[Timing, int], float]) -> list[tuple[float, float]]:
    """(bytes, us) at each size, of the cheaper kind of group (dense or expert). Between two sizes the times of both
    kinds are linear, so the lesser of them is not below the line through the points."""
    found: dict[int, float] = {}
    for own in timing.kinds:
        for size in sizes:
            with contextlib.suppress(InputError):  # not offered by this rank's algorithms, or beyond the measured range
                found[size] = min(us_of(own, size), found.get(size, inf))
    return sorted(found.items())


def _publish_points(timing: Timing, pp_rank: int, route: str, largest: int) -> list[tuple[float, float]]:
    """(bytes, us) at which publishing for ``route`` can have its best rate; empty where the table cannot say."""
    sizes: set[int] = set()
    for own in timing.kinds:
        nodes, publish = own.crosses_nodes[pp_rank], own.table.publish
        if not all(map(own.offers_curve, (f"publish.{route}", *(["publish.internode"] if nodes > 1 else [])))):
            return []
        of_kind = {p.size_bytes for p in points_of(getattr(publish, route)) + points_of(publish.internode)}
        sizes |= of_kind | ({-(-size * nodes // (nodes - 1)) for size in of_kind} if nodes > 1 else set())
    found = _least(timing, best_rate_sizes(sizes, largest), lambda own, size: own.publish_us(pp_rank, (route,), size))
    return [(size, us) for size, us in found if us]


def _best_rate_within(points: list[tuple[float, float]], us: float) -> float:
    """The best rate of any gather that takes at most ``us``: the rate at a point, or where a segment reaches ``us``."""
    best, before = 0.0, None
    for size, took in points:
        within = took <= us
        if within and (rate := size / took) > best:
            best = rate
        if before is not None and before[2] != within:
            share = (us - before[1]) / (took - before[1])
            best = max(best, (before[0] + share * (size - before[0])) / us)
        before = size, took, within
    if points and points[0][1] > us:  # gathers smaller than measured are not faster per byte than this
        best = max(best, points[0][0] / points[0][1])
    return best
