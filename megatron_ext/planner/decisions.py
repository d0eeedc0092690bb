"""All decisions about the gathers of a rank, and the schedule that follows from them. Decisions are: which groups stay
whole between two uses, and the order, the route and the earliest place of every gather.

A gather is issued as early as memory allows, but not before its earliest place and not before the gathers that precede
it in the order. Groups that stay whole, and groups at their own use, get memory first.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from megatron_ext.planner.assemble import Freed, Placed
from megatron_ext.planner.blocks import Blocks, BlockUse, block_uses_of_rank
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import ALL_GATHER, Route
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


class Decisions(NamedTuple):
    """The decisions of one rank. Gaps are named by their numbers.

    Attributes:
        kept: gaps over which the group stays whole.
        order: the other gaps, in the order in which their gathers are issued.
        routes: route of every gap; the routes of kept gaps have no meaning.
        earliest: by gap, the earliest use before which the gather may be issued (-1: at the start).
    """

    kept: frozenset[int]
    order: tuple[int, ...]
    routes: tuple[Route, ...]
    earliest: tuple[int, ...]


class RankGaps:
    """The gaps that the decisions of one rank are about.

    Attributes:
        fixed: gaps within a step, over which a group of several blocks has to stay.
        first: by gap, the first use before which the group may be gathered.
    """

    def __init__(self, workload: Workload, timing: Timing, blocks: Blocks, rank: int):
        self.uses = block_uses_of_rank(workload, timing, blocks, rank)
        self.gaps = _gaps_of_rank(workload, blocks, self.uses, rank)
        self.sizes = [blocks.groups[gap.group].bytes for gap in self.gaps]
        self.first = tuple(gap.first for gap in self.gaps)
        self.fixed = frozenset(
            number
            for number, gap in enumerate(self.gaps)
            if gap.after >= 0 and self.uses[gap.after].step == self.uses[gap.use].step
        )
        self.of_group: dict[int, list[int]] = {}
        for number, gap in enumerate(self.gaps):
            self.of_group.setdefault(gap.group, []).append(number)
        self.limit = inf if workload.streamed_bytes is None else workload.streamed_bytes

    def whole_bytes(self, kept: frozenset[int]) -> list[int]:
        """Bytes that are whole before each use, if every group is gathered at its use. Index 0 is the start."""
        whole = [0] * (len(self.uses) + 1)
        for number, (gap, size) in enumerate(zip(self.gaps, self.sizes)):
            whole[gap.use + 1] += size
            if number in kept:
                for use in range(gap.after + 1, gap.use):
                    whole[use + 1] += size
        return whole

    def placed(self, decisions: Decisions) -> tuple[list[Placed], list[Freed]] | None:
        """Unshards in issue order, and reshards. None if the groups do not fit, or if a gather would come after its
        use."""
        whole, limit = self.whole_bytes(decisions.kept), self.limit
        if max(whole) > limit:
            return None
        placed, last = [], -1
        for number in decisions.order:
            gap, size = self.gaps[number], self.sizes[number]
            lowest = max(last, self.first[number], decisions.earliest[number])
            if lowest > gap.use:
                return None
            place = gap.use
            while place > lowest and whole[place] + size <= limit:  # ends: each turn lowers place
                place -= 1
                whole[place + 1] += size
            last = place
            placed.append(self.gather(number, place, decisions.routes[number]))
        return placed, self.freed(decisions.order, at_the_end=limit < inf)

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
            uses += [(group, self.gaps[numbers[-1]].use) for group, numbers in self.of_group.items()]
        return [Freed(group, self.uses[use].step, self.uses[use].after) for group, use in uses]

    def decisions_of(self, schedule: Schedule, rank: int) -> Decisions:
        """The decisions that lead to the gathers of ``schedule``, whose groups must be the groups of these gaps."""
        places = {}
        for number, use in enumerate(self.uses):
            places.setdefault((use.step, use.before), number)
        actions = [(-1, action) for action in schedule.ranks[rank].start.unshard]
        actions += [(step, a) for step, entry in enumerate(schedule.ranks[rank].steps) for a in entry.unshard]
        order: dict[int, Route] = {}
        earliest = list(self.first)
        for step, action in actions:
            # An action between two blocks of another cut counts as an action of the next use.
            place = -1 if step < 0 else places.get((step, action.at), places[step, -1])
            need_by = step if action.need_by < 0 else action.need_by
            for number in self.of_group[action.group]:
                use = self.gaps[number].use
                if number not in order and use >= place and self.uses[use].step == need_by:
                    order[number], earliest[number] = action.route, place
                    break
        routes: tuple[Route, ...] = tuple(order.get(number, ALL_GATHER) for number in range(len(self.gaps)))
        kept = frozenset(number for number in range(len(self.gaps)) if number not in order)
        return Decisions(kept, tuple(order), routes, tuple(earliest))
