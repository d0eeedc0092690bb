"""By how much activities of a rank slow each other, as a cost table says."""

from functools import cache

from megatron_ext.cost.cost_table import KINDS, CostTable
from megatron_ext.cost.estimates import Costs

_PCIE = (("gpu", "cpu"), ("cpu", "gpu"))
_NETWORK = (("gpu", "reduce"), ("reduce", "gpu"))
"""Where they are at the same time at all: on communicators of their own, over the same links."""


class Slowdowns:
    """Excess times of one cost table, each looked up once and kept.

    Attributes:
        disturbed: by kind, whether anything slows it at all, so that undisturbed kinds cost no look-ups.
        disturbs: by kind, whether it slows anything.
    """

    def __init__(self, table: CostTable, costs: Costs):
        self._table, self._costs = table, costs
        measured = {(row.measured, row.busy) for row in table.contention}
        self._shared = {*_NETWORK, *_PCIE * table.topology.nic_shares_pcie} - measured
        rows = {(row.measured, row.busy) for row in table.contention if row.slowdown > 1.0} | self._shared
        self._pairs = [[(measured, busy) in rows for busy in KINDS] for measured in KINDS]
        """By kind and kind beside it: whether the second slows the first."""
        self.disturbed = tuple(map(any, self._pairs))
        self.disturbs = tuple(map(any, zip(*self._pairs)))
        self.excess = cache(self._excess)
        self.slowing = cache(self._slowing)

    def _excess(self, kind: int, size_bytes: int) -> tuple[float, ...]:
        """By busy kind: the share by which an activity of ``kind`` takes longer beside it.

        Shares add up over busy kinds, which is exact for one fairly shared link. A NIC on
        the PCIe link of the host copies is such a link, and the network for collectives of
        two communicators: two transfers at once take twice as long each, unless the pair was measured.
        """
        return tuple(
            self._slowdown(KINDS[kind], busy, size_bytes) - 1.0 if there else 0.0
            for busy, there in zip(KINDS, self._pairs[kind])
        )

    def _slowing(self, kind: int, size_bytes: int) -> list[tuple[int, float]]:
        """Of :meth:`excess`, the other kinds that slow it, with their shares."""
        return [each for each in enumerate(self.excess(kind, size_bytes)) if each[1] and each[0] != kind]

    def least_excess(self, measured: int, busy: int) -> float:
        """The least excess of ``measured`` beside ``busy`` in any row. Where none was measured: 1 of a link
        that both share, else 0."""
        if not self._pairs[measured][busy]:
            return 0.0
        names = (KINDS[measured], KINDS[busy])
        rows = [row.slowdown for row in self._table.contention if (row.measured, row.busy) == names]
        return max(min(rows) - 1.0, 0.0) if rows else self.excess(measured, 0)[busy]

    def _slowdown(self, measured: str, busy: str, size_bytes: int) -> float:
        if (measured, busy) in self._shared:
            return 2.0
        return self._costs.slowdown(measured, busy, size_bytes or None)
