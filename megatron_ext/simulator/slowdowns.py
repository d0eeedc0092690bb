"""How much the activities of a rank slow each other according to a cost table."""

from functools import cache

from megatron_ext.cost.cost_table import KINDS, CostTable
from megatron_ext.cost.estimates import Costs

_PCIE = (("gpu", "cpu"), ("cpu", "gpu"))
_NETWORK = (("gpu", "reduce"), ("reduce", "gpu"))
"""Pairs of collectives that run at the same time only on separate communicators, over the same links."""


class Slowdowns:
    """Excess times of one cost table, each looked up once and kept.

    Attributes:
        disturbs: by kind, whether it slows anything.
    """

    def __init__(self, table: CostTable, costs: Costs):
        self._table, self._costs = table, costs
        measured = {(row.measured, row.busy) for row in table.contention}
        self._shared = {*_NETWORK, *_PCIE * table.topology.nic_shares_pcie} - measured
        rows = {(row.measured, row.busy) for row in table.contention if row.slowdown > 1.0} | self._shared
        self._pairs = [[(measured, busy) in rows for busy in KINDS] for measured in KINDS]
        """By kind and kind that runs at the same time: whether the second slows the first."""
        self.disturbs = tuple(map(any, zip(*self._pairs)))
        self.excess = cache(self._excess)
        self.slowing = cache(self._slowing)

    def _excess(self, kind: int, size_bytes: int) -> tuple[float, ...]:
        """By busy kind: the share by which an activity of ``kind`` takes longer while that kind is busy.

        Shares add up over busy kinds, which is exact for one fairly shared link. Two cases are such a link: the PCIe
        link of the host copies that a NIC shares, and the network for collectives of two communicators. There two
        transfers at once take twice as long each, unless the pair was measured.
        """
        return tuple(
            self._slowdown(KINDS[kind], busy, size_bytes) - 1.0 if there else 0.0
            for busy, there in zip(KINDS, self._pairs[kind])
        )

    def _slowing(self, kind: int, size_bytes: int) -> list[tuple[int, float]]:
        """The other kinds that slow an activity of ``kind``, with their shares from :meth:`excess`."""
        return [each for each in enumerate(self.excess(kind, size_bytes)) if each[1] and each[0] != kind]

    def least_excess(self, measured: int, busy: int) -> float:
        """The least excess of ``measured`` while ``busy`` runs, over all rows. Without a row it is 1 for a link that
        both share, else 0."""
        if not self._pairs[measured][busy]:
            return 0.0
        names = (KINDS[measured], KINDS[busy])
        rows = [row.slowdown for row in self._table.contention if (row.measured, row.busy) == names]
        return max(min(rows) - 1.0, 0.0) if rows else self.excess(measured, 0)[busy]

    def _slowdown(self, measured: str, busy: str, size_bytes: int) -> float:
        if (measured, busy) in self._shared:
            return 2.0
        return self._costs.slowdown(measured, busy, size_bytes or None)
