"""The times between two uses of a group on one rank, in each of which the group is gathered once or stays whole."""

from collections.abc import Iterable
from typing import NamedTuple

from megatron_ext.planner.assemble import Freed, Placed
from megatron_ext.planner.blocks import Blocks, BlockUse, block_uses_of_rank
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload


class Gap(NamedTuple):
    """The time between two uses of a group: from its use ``after`` (-1: from the start) to its block use ``use``."""

    rank: int
    group: int
    after: int
    use: int

    @property
    def first(self) -> int:
        """The first use before which the group may be gathered; -1: the start."""
        return self.after + 1 if self.after >= 0 else -1


def _gaps_of_rank(workload: Workload, blocks: Blocks, block_uses: list[BlockUse], rank: int) -> list[Gap]:
    """All gaps of a rank in the order of their uses; at zero stage 1 only the first gap of each group."""
    gaps, last = [], {}
    for number, block_use in enumerate(block_uses):
        for group in blocks.blocks[block_use.block].groups if block_use.block >= 0 else ():
            if workload.zero_stage == 3 or group not in last:
                gaps.append(Gap(rank, group, last.get(group, -1), number))
            last[group] = number
    return gaps


class RankGaps:
    """The gaps of one rank. They are named by their numbers.

    Attributes:
        fixed: gaps within a step, over which a group of several blocks has to stay.
    """

    def __init__(self, workload: Workload, timing: Timing, blocks: Blocks, rank: int):
        self.uses = block_uses_of_rank(workload, timing, blocks, rank)
        self.gaps = _gaps_of_rank(workload, blocks, self.uses, rank)
        self.sizes = [blocks.groups[gap.group].bytes for gap in self.gaps]
        self.fixed = frozenset(
            number
            for number, gap in enumerate(self.gaps)
            if gap.after >= 0 and self.uses[gap.after].step == self.uses[gap.use].step
        )

    def gather(self, number: int, place: int, route: Route) -> Placed:
        """The gather in a gap, issued just before the use ``place`` (-1: at the start)."""
        gap, (step, at) = self.gaps[number], (-1, -1)
        if place >= 0:
            step, at = self.uses[place].step, self.uses[place].before
        return Placed(gap.group, route, step, self.uses[gap.use].step, at)

    def freed(self, gathered: Iterable[int], at_the_end: bool) -> list[Freed]:
        """Reshards before the gathers in these gaps, and after the last use of every group if ``at_the_end``."""
        uses = [(gap.group, gap.after) for gap in map(self.gaps.__getitem__, gathered) if gap.after >= 0]
        if at_the_end:
            uses += {gap.group: gap.use for gap in self.gaps}.items()  # the last use of each group
        return [Freed(group, self.uses[use].step, self.uses[use].after) for group, use in uses]
