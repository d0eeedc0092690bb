"""The placement pass: at which step and by which route every group is unsharded and, at zero stage 3, resharded.

[Note: Placement pass]
Megatron's order is fixed, so all uses of all blocks (:mod:`megatron_ext.planner.blocks`) are known. One pass goes
through the uses of every rank in order and keeps an estimate of the time. It decides by three rules:

* Free: when memory is needed, the group whose next use lies farthest in the future is resharded (Belady 1966). This
  gathers the fewest bytes. It is resharded only for a group that is used before that, so that prefetching never costs
  an additional gather (Cao, Felten, Karlin and Li, "A study of integrated prefetching and caching strategies", 1995).
  The groups of a block are freed one by one.
* Prefetch: groups that are used within a time horizon are unsharded early, in the order of their uses. A longer horizon
  hides more time but frees groups earlier. The search tries several horizons.
* Route: a gather takes the route by which it arrives first. This counts the queue of the link and the time at which the
  group is published. Links that disturb each other are left to the simulator. After the last backward of a block its
  gradients are reduced. The reduces use the communicator of the all-gathers, so later all-gathers queue behind them.

At zero stage 1 nothing is freed. Groups are unsharded in the order of their first uses, which has the least lateness on
each link (earliest deadline first, Jackson 1955).

All ranks advance together, each as far as its inputs have arrived: a rank that waits for a gather delays the others.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from megatron_ext.planner.assemble import Freed, Placed
from megatron_ext.planner.blocks import Blocks
from megatron_ext.planner.knapsack import best_fill, least_cover
from megatron_ext.planner.rank_uses import GroupTimes, RankUses
from megatron_ext.simulator.activity_kinds import CPU, GPU, link_of
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Copy, Route, RouteKind, kind_of, shard_pieces
from megatron_ext.workload.step_order import run_in_order, steps_of_ranks
from megatron_ext.workload.workload import Workload

ROUNDING = 1e-12
"""What additions may round off, as a part of the sums."""


class Placement(NamedTuple):
    """Unshards and reshards by rank, and the estimated times at which the last step and the reduces end
    (microseconds). ``alike``: all horizons between these two (microseconds) give the same plan."""

    placed: list[list[Placed]]
    freed: list[list[Freed]]
    end_us: float
    alike: tuple[float, float]


class Choices(NamedTuple):
    """Input of a placement pass.

    Attributes:
        horizon_us: how far ahead groups are prefetched.
        routes: routes that may be used.
        hosted: groups that may have a host copy.
        staged: groups that may go through staging slots.
        forced: by (rank, number of the rank's unshard in issue order), the route that it has to take.
        from_host: groups whose shards rest in host memory.
    """

    horizon_us: float
    routes: tuple[Route, ...]
    hosted: frozenset[int]
    staged: frozenset[int] = frozenset()
    forced: dict[tuple[int, int], str] = {}
    from_host: frozenset[int] = frozenset()

    def may_take(self, route: Route, group: int) -> bool:
        """Whether a group can go by a route at all."""
        kind = kind_of(route)
        if kind.gathers:
            return kind.shard_from_host == (group in self.from_host)
        return group in (self.staged if kind.staged else self.hosted)

    def ways(self, group: int) -> tuple[Route, ...]:
        """The routes that a group may take."""
        return tuple(route for route in self.routes if self.may_take(route, group))


def _queue(kind: RouteKind) -> int | str:
    """The queue of a gather: its link, or a queue of its own if it crosses several links."""
    return kind.name if kind.staged or kind.shard_from_host else link_of(kind.name)


_Way = tuple[RouteKind, int | str, int, bool]
"""A route of a group, its queue, its last link, and whether its all-gathers wait for the reduces."""


class RankPlacement:
    """The placement pass of one pipeline rank."""

    def __init__(self, given: RankUses, times: GroupTimes, choices: Choices):
        self.given, self.times, self.choices = given, times, choices
        self.workload, self.blocks, self.pp_rank = given.workload, given.blocks, given.pp_rank
        self.block_uses, self.sizes, self.stays = given.block_uses, given.sizes, given.stays
        self.free = inf if self.workload.streamed_bytes is None else self.workload.streamed_bytes
        self.whole: dict[int, int] = {}  # group -> the use until which it must stay whole
        self.arrives: dict[int, float] = {}  # group -> estimated time at which it is whole
        self.possible: dict[int, list[_Way]] = {}  # group -> routes that it may take
        self.uses_to_come = {group: [inf, *uses] for group, uses in given.uses.items()}  # the next one last
        self.front = 0  # every use before this one has its block whole or in flight
        self.link_free: dict[int | str, float] = {}  # by queue
        self.reduced = 0.0  # when everything that was issued to be reduced is reduced
        self.freed_at = 0.0  # when the last whole gradient that comes and goes is freed
        self.published: dict[int, float] = {}
        self.publish_free = 0.0
        self.staged: dict[int, list[int]] = {}  # step -> groups staged in there, by slot
        self.placed: list[Placed] = []
        self.freed: list[Freed] = []
        self.number = 0
        self.now = 0.0
        self.within_us, self.beyond_us = 0.0, inf  # farthest use within the horizon, nearest use beyond it
        self._look_ahead(-1)  # actions before the first step

    def run_step(self, step: int, begin: float) -> float:
        """Place what the uses of one step need. The step may begin at ``begin``. Returns the estimated end of the
        step."""
        self.now = max(self.now, begin)
        given, whole, block_uses, arrives = self.given, self.whole, self.block_uses, self.arrives
        # ends: each turn raises number
        while self.number < len(block_uses) and block_uses[self.number].step == step:
            number = self.number
            _, block, us, *_ = block_uses[number]
            groups, done = given.groups_of[number], []
            if block >= 0:
                for group in groups:
                    uses = self.uses_to_come[group]
                    uses.pop()
                    if len(uses) == 1 and self.blocks.groups[group].gradients is None:
                        done.append(group)
                if self.front <= number:
                    # Groups that are still whole stay whole. Then memory is freed for those that are not.
                    for group in groups:
                        if group in whole:
                            whole[group] = self.stays.get((group, number), number)
                    missing = [group for group in given.longest[number] if group not in whole]
                    fits = self._free_up(number, missing, beyond=number)
                    assert fits, "the largest block fits, and nothing else must stay"
                    for group in missing:
                        self._bring(number, group, number)
                    self.front = number + 1
                self._look_ahead(number)
                for group in groups:
                    if arrives[group] > self.now:
                        self.now = arrives[group]
                if number in given.alone and self.freed_at > self.now:
                    self.now = self.freed_at
            self.now += us
            self.number += 1
            if done:
                self._reduce(done)
            for group in given.due.get(number, ()):
                self._reduce_visit(group)
        return self.now

    def _reduce_visit(self, group: int) -> None:
        """Reduce a gradient that comes and goes. The previous one must be finished first."""
        self.now = max(self.now, self.freed_at)
        self._reduce((group,))
        self.freed_at = max(self.now, self.reduced)
        if self.blocks.groups[group].gradients == "host":
            self.freed_at += self.times.to_host(group)

    def _reduce(self, groups: Iterable[int]) -> None:
        """Reduce the gradients of ``groups``, after everything that was issued before."""
        us = sum([self.times.reduce(group) for group in groups])
        if us:
            self.reduced = max(self.now, self.reduced, self.link_free.get(GPU, 0.0)) + us

    def _look_ahead(self, number: int) -> None:
        """Prefetch the blocks of later uses, as far as the horizon and the memory limit allow."""
        given, whole, stays = self.given, self.whole, self.stays
        ideal, longest, last = given.ideal, given.longest, len(self.block_uses)
        reach = (begin := ideal[max(number, 0)]) + self.choices.horizon_us
        current = given.groups_of[number] if number >= 0 else ()
        while self.front < last:  # ends: each turn raises front or returns
            front, ahead = self.front, ideal[self.front] - begin
            if ideal[front] > reach:
                self.beyond_us = min(self.beyond_us, ahead)
                return
            self.within_us = max(self.within_us, ahead)
            missing = []
            for group in longest[front]:
                if group in whole:
                    until = stays.get((group, front), front) if stays else front
                    whole[group] = max(whole[group], until)
                else:
                    missing.append(group)
            if missing:
                fits = self._free_up(number, missing, beyond=front, keep=current)
                if not fits:
                    others = [group for group in given.groups_of[front] if group not in whole]
                    chosen = best_fill(tuple(self.sizes[group] for group in others), int(self.free))
                    missing = sorted((others[index] for index in chosen), key=longest[front].index)
                for group in missing:
                    self._bring(number, group, front)
                if not fits:
                    return
            self.front += 1

    def _free_up(self, number: int, missing: list[int], *, beyond: int, keep: tuple[int, ...] = ()) -> bool:
        """Free groups whose next use is after ``beyond``, the farthest first, until all of ``missing`` fit. Of groups
        with the same next use, those are freed that exceed the need by the fewest bytes.

        Returns:
            Whether they fit. If not, everything that may be freed is freed.
        """
        sizes, to_come, whole = self.sizes, self.uses_to_come, self.whole
        short = sum([sizes[group] for group in missing]) - self.free
        if short <= 0:
            return True
        usable = sorted((to_come[one][-1], one) for one, until in whole.items() if until < number and one not in keep)
        while usable and usable[-1][0] > beyond:  # ends: each turn shortens usable
            use, others = usable[-1][0], []
            while usable and usable[-1][0] == use:  # ends: likewise
                others.insert(0, usable.pop()[1])
            own = tuple([sizes[other] for other in others])
            if len(own) > 1 and sum(own) > short:
                others = [others[index] for index in least_cover(own, int(short))]
            for other in others:
                self._release(number, other)
                short -= sizes[other]
            if short <= 0:
                return True
        return False

    def _release(self, number: int, group: int) -> None:
        """Free ``group`` right after the use before ``number``. If the step of that use needs the group again, free it
        right after its own last use, because a group may be freed in a step only after its use."""
        previous, until = self.block_uses[number - 1], self.whole.pop(group)
        use = self.uses_to_come[group][-1]
        if use < inf and self.block_uses[use].step == previous.step:
            previous = self.block_uses[until]
        self.free += self.sizes[group]
        self.freed.append(Freed(group, previous.step, previous.after))

    def _bring(self, number: int, group: int, use: int) -> None:
        """Unshard ``group`` just before use ``number`` (-1: at the start), to be whole for ``use``."""
        issue, at = (-1, -1) if number < 0 else (self.block_uses[number].step, self.block_uses[number].before)
        self.whole[group] = self.stays.get((group, use), use) if self.stays else use
        self.free -= self.sizes[group]
        (kind, queue, link, _), arrival = self._route(group, issue)
        if kind.shard_from_host:
            self.link_free[CPU] = max(self.now, self.link_free.get(CPU, 0.0)) + self.times.shard_copy(group)
            self.link_free[GPU] = arrival
        slot = -1
        if kind.staged:
            slots = self.staged.setdefault(issue, [])
            slot = len(slots)
            slots.append(group)
            self.link_free[link] = max(self.link_free.get(link, 0.0), arrival)
        self.link_free[queue] = arrival
        self.arrives[group] = arrival
        self.placed.append(Placed(group, kind.name, issue, self.block_uses[use].step, at, slot, issue))

    def _route(self, group: int, issue: int) -> tuple[_Way, float]:
        """The route by which the group arrives first, and the time of arrival. Links that disturb each other are left
        to the simulator."""
        best, least, forced = None, inf, None
        if self.choices.forced:
            forced = self.choices.forced.get((self.pp_rank, len(self.placed)))
        ways = self.possible.get(group)
        if ways is None:
            kinds = map(kind_of, self.choices.ways(group))
            one = self.blocks.groups[group].algorithm is None
            ways = [(kind, _queue(kind), link_of(kind.name), kind.needs_device_shard and one) for kind in kinds]
            self.possible[group] = ways
        for way in ways:
            kind, queue, _, waits = way
            if kind.staged and not self._has_slot(group, issue):
                continue
            begin = max(self.now, self.link_free.get(queue, 0.0))
            if kind.copy is not None and not kind.staged:
                begin = max(begin, self._published_at(group, kind.copy))
            if waits and self.reduced > begin:
                begin = self.reduced
            shard = kind.shard_from_host
            end = self._by_shard(group, kind.name) if shard else begin + self.times.unshard(group, kind.name)
            if kind.name == forced:
                return way, end
            if end < least:
                best, least = (way, end), end
        assert best is not None, "every group has a route"
        return best

    def _by_shard(self, group: int, route: Route) -> float:
        """The time at which a group is whole if its shards are copied from the host and gathered, piece by piece."""
        pieces = shard_pieces(self.sizes[group], self.blocks.groups[group].ranks)
        gather_us, copy_us = self.times.unshard(group, route), self.times.shard_copy(group)
        begin = max(self.now, self.link_free.get(CPU, 0.0))
        gathered = max(begin + copy_us / pieces, self.link_free.get(GPU, 0.0)) + gather_us
        return max(gathered, begin + copy_us + gather_us / pieces)

    def _has_slot(self, group: int, issue: int) -> bool:
        staged = self.staged.get(issue, ())
        return len(staged) < self.workload.limits.nvme_slots and group not in staged

    def _published_at(self, group: int, copy: Copy) -> float:
        ready = self.published.get(group)
        if ready is None:
            ready = self.published[group] = self.publish_free = self.publish_free + self.times.publish(group, copy)
        return ready


class GatherPlacer:
    """Places the gathers of these blocks, for one set of choices after another."""

    def __init__(self, workload: Workload, timing: Timing, blocks: Blocks):
        self.workload, self.timing, self.times = workload, timing, GroupTimes(workload, timing, blocks)
        self.ranks = [RankUses(workload, timing, blocks, rank) for rank in range(workload.parallel.pp)]

    def place(self, choices: Choices) -> Placement:
        """Run the placement pass of all ranks through one iteration."""
        parallel = self.workload.parallel
        placements = [RankPlacement(given, self.times, choices) for given in self.ranks]
        run = lambda rank, index, _, arrival: placements[rank].run_step(index, arrival)
        run_in_order(parallel, steps_of_ranks(parallel), self.timing.p2p_us, run)
        rounding, us = ROUNDING * max(one.given.ideal[-1] for one in placements), choices.horizon_us
        within, beyond = max(one.within_us for one in placements), min(one.beyond_us for one in placements)
        return Placement(
            [one.placed for one in placements],
            [one.freed for one in placements],
            max(max(one.now, one.reduced) for one in placements),
            (min(within + rounding, us), max(beyond - rounding, us)),
        )


def place_gathers(workload: Workload, timing: Timing, blocks: Blocks, choices: Choices) -> Placement:
    """Place the gathers of these blocks for one set of choices."""
    return GatherPlacer(workload, timing, blocks).place(choices)
