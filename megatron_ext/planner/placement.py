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
* Route: a gather takes the link on which it arrives first. This counts the queue of the link, contention between links,
  and the time at which the group is published. After the last backward of a block its gradients are reduced. They use
  the communicator of the all-gathers, and later all-gathers queue behind them.

At zero stage 1 nothing is freed. Groups are unsharded in the order of their first uses, which has the least lateness on
each link (earliest deadline first, Jackson 1955).

All ranks advance together, each as far as its inputs have arrived: a rank that waits for a gather delays the others.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from megatron_ext.planner.assemble import Freed, Placed
from megatron_ext.planner.blocks import Blocks, block_uses_of_rank
from megatron_ext.planner.knapsack import best_fill, least_cover
from megatron_ext.schedule.memory_bill import gradient_bytes
from megatron_ext.simulator.activity_kinds import CPU, GPU
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route, shard_pieces
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload


class Plan(NamedTuple):
    """Unshards and reshards by rank, and the estimated end of the last step and of reducing (microseconds)."""

    placed: list[list[Placed]]
    freed: list[list[Freed]]
    end_us: float


class Choices(NamedTuple):
    """Input of a placement pass.

    Attributes:
        horizon_us: how far ahead groups are prefetched.
        routes: routes that may be used.
        hosted: groups that may have a host copy.
        staged: groups that may go by ``nvme``.
        forced: by (rank, number of its unshard in issue order), a route.
        held: (rank, use): nothing for this use or later ones is prefetched before it.
        from_host: groups whose shards rest in host memory.
    """

    horizon_us: float
    routes: tuple[Route, ...]
    hosted: frozenset[int]
    staged: frozenset[int] = frozenset()
    forced: dict[tuple[int, int], str] = {}
    held: frozenset[tuple[int, int]] = frozenset()
    from_host: frozenset[int] = frozenset()


class RankPlacement:
    """The placement pass of one pipeline rank. A use is named by its number among the rank's block uses."""

    def __init__(self, workload: Workload, timing: Timing, blocks: Blocks, choices: Choices, pp_rank: int):
        self.workload, self.timing, self.blocks, self.choices, self.pp_rank = workload, timing, blocks, choices, pp_rank
        self.block_uses = block_uses_of_rank(workload, timing, blocks, pp_rank)
        self.groups_of = [blocks.blocks[use.block].groups if use.block >= 0 else () for use in self.block_uses]
        limit = workload.limits.whole_parameter_bytes if workload.zero_stage == 3 else None
        self.free = inf if limit is None else limit
        self.whole: dict[int, int] = {}  # group -> the use up to which it must stay
        self.arrives: dict[int, float] = {}  # group -> estimated time at which it is whole
        self.uses_to_come: dict[int, list[int]] = {}  # group -> its remaining uses, last first
        self.stays: dict[
            tuple[int, int], int
        ] = {}  # (group, use) -> last use of that step, of groups of several blocks
        for number in range(len(self.block_uses) - 1, -1, -1):
            for group in self.groups_of[number]:
                uses = self.uses_to_come.setdefault(group, [])
                if uses and self.block_uses[uses[-1]].step == self.block_uses[number].step:
                    self.stays[group, number] = self.stays.get((group, uses[-1]), uses[-1])
                uses.append(number)
        self.ideal = [0.0]
        for block_use in self.block_uses:
            self.ideal.append(self.ideal[-1] + block_use.us)
        self.front = 0  # every use before this one has its block whole or in flight
        self.link_free = dict.fromkeys(choices.routes, 0.0)
        self.reduced = 0.0  # when what was issued to be reduced is
        self.freed_at = 0.0  # when the last whole gradient that comes and goes is freed
        self.alone: set[int] = set()  # uses with a gradient that is allocated when the one before is freed
        self.due = self._reduces_due()
        self.published: dict[int, float] = {}
        self.publish_free = 0.0
        self.staged: dict[int, list[int]] = {}  # step -> groups staged in there, by slot
        self.placed: list[Placed] = []
        self.freed: list[Freed] = []
        self.number = 0
        self.now = 0.0

    def start(self) -> None:
        """Actions before the first step."""
        self._look_ahead(-1)

    def run_step(self, step: int, begin: float) -> float:
        """Place what the uses of one step need; the step may begin at ``begin``. Returns its estimated end."""
        self.now = max(self.now, begin)
        # ends: each turn raises number
        while self.number < len(self.block_uses) and self.block_uses[self.number].step == step:
            number = self.number
            _, block, us, *_ = self.block_uses[number]
            groups, done = self.groups_of[number], []
            if block >= 0:
                for group in groups:
                    uses = self.uses_to_come[group]
                    uses.pop()
                    if not uses and self.blocks.groups[group].gradients is None:
                        done.append(group)
                if self.front <= number:
                    # What is still whole stays; then memory is freed for what is not.
                    for group in groups:
                        if group in self.whole:
                            self.whole[group] = self.stays.get((group, number), number)
                    missing = [group for group in groups if group not in self.whole]
                    fits = self._free_up(number, missing, beyond=number)
                    assert fits, "the largest block fits, and nothing else must stay"
                    for group in self._longest_first(missing):
                        self._bring(number, group, number)
                    self.front = number + 1
                self._look_ahead(number)
                for group in groups:
                    if self.arrives[group] > self.now:
                        self.now = self.arrives[group]
                if number in self.alone:
                    self.now = max(self.now, self.freed_at)
            self.now += us
            self.number += 1
            if done:
                self._reduce(done)
            for group in self.due.get(number, ()):
                self._reduce_visit(group)
        return self.now

    def _reduces_due(self) -> dict[int, list[int]]:
        """By use, the groups whose gradients come and go and are reduced behind it."""
        steps = steps_of_ranks(self.workload.parallel)[self.pp_rank]
        due: dict[int, list[int]] = {}
        for group, uses in self.uses_to_come.items():
            if self.blocks.groups[group].gradients is None:
                continue
            last = {self.block_uses[n].step: n for n in reversed(uses) if steps[self.block_uses[n].step].kind == "B"}
            visits, every = list(last.values()), self.blocks.groups[group].reduce_every
            if self.blocks.groups[group].alone:
                begins = {self.block_uses[n].step: n for n in uses if self.block_uses[n].step in last}
                self.alone.update(list(begins.values())[::-1][::every])
            for number in {*visits[every - 1 :: every], *visits[-1:]}:
                due.setdefault(number, []).append(group)
        return due

    def _reduce_visit(self, group: int) -> None:
        """Reduce a gradient that comes and goes; the one before is waited for."""
        self.now = max(self.now, self.freed_at)
        self._reduce([group])
        self.freed_at = max(self.now, self.reduced)
        if self.blocks.groups[group].gradients == "host":
            size = gradient_bytes(self.blocks.groups[group], self.workload)
            self.freed_at += self._timing(group).to_host_us(size)[0]

    def _reduce(self, groups: Iterable[int]) -> None:
        """Reduce the gradients of ``groups``, behind what was issued before."""
        us = sum(self._timing(group).reduce_us(self.blocks.groups[group].bytes) for group in groups)
        if us:
            self.reduced = max(self.now, self.reduced, self.link_free.get("gpu", 0.0)) + us

    def _look_ahead(self, number: int) -> None:
        """Prefetch the blocks of later uses, as far as the horizon and the memory limit allow."""
        ideal, whole, held = self.ideal, self.whole, self.choices.held
        reach = ideal[max(number, 0)] + self.choices.horizon_us
        current = self.groups_of[number] if number >= 0 else ()
        # ends: each turn raises front or returns
        while self.front < len(self.block_uses) and ideal[self.front] <= reach:
            if held and (self.pp_rank, self.front) in held:
                return
            missing = []
            for group in self.groups_of[self.front]:
                if group in whole:
                    whole[group] = max(whole[group], self.stays.get((group, self.front), self.front))
                else:
                    missing.append(group)
            if not missing:
                self.front += 1
                continue
            fits = self._free_up(number, missing, beyond=self.front, keep=current)
            if not fits:
                sizes = tuple(self.blocks.groups[group].bytes for group in missing)
                missing = [missing[index] for index in best_fill(sizes, int(self.free))]
            for group in self._longest_first(missing):
                self._bring(number, group, self.front)
            if not fits:
                return
            self.front += 1

    def _longest_first(self, missing: list[int]) -> list[int]:
        """The order that spreads groups for one use most evenly over the links (Graham 1969)."""
        return sorted(missing, key=lambda group: (-self.blocks.groups[group].bytes, group))

    def _next_use(self, group: int) -> float:
        uses = self.uses_to_come[group]
        return uses[-1] if uses else inf

    def _free_up(self, number: int, missing: list[int], *, beyond: int, keep: tuple[int, ...] = ()) -> bool:
        """Free groups whose next use lies beyond ``beyond``, farthest first, until all of
        ``missing`` fit; of those with the same next use, the ones that free the fewest bytes too many.

        Returns:
            Whether they fit. If not, everything that may be freed has been freed.
        """
        groups = self.blocks.groups
        short = sum(groups[group].bytes for group in missing) - self.free
        if short <= 0:
            return True
        usable: dict[float, list[int]] = {}
        for other, until in self.whole.items():
            if until < number and other not in keep and (use := self._next_use(other)) > beyond:
                usable.setdefault(use, []).append(other)
        for use in sorted(usable, reverse=True):
            others = sorted(usable[use])
            sizes = tuple(groups[other].bytes for other in others)
            if sum(sizes) > short:
                others = [others[index] for index in least_cover(sizes, int(short))]
            for other in others:
                self._release(number, other)
                short -= groups[other].bytes
            if short <= 0:
                return True
        return False

    def _release(self, number: int, group: int) -> None:
        """Free ``group`` right after the use before ``number``; where it is needed again within that
        use's step, right after its own last use: a group may be freed in a step only behind its use."""
        previous, until = self.block_uses[number - 1], self.whole.pop(group)
        again = self._next_use(group)
        if again < inf and self.block_uses[int(again)].step == previous.step:
            previous = self.block_uses[until]
        self.free += self.blocks.groups[group].bytes
        self.freed.append(Freed(group, previous.step, previous.after))

    def _bring(self, number: int, group: int, use: int) -> None:
        """Unshard ``group`` just before use ``number`` (-1: at the start), to be whole for ``use``."""
        issue, at = (-1, -1) if number < 0 else (self.block_uses[number].step, self.block_uses[number].before)
        self.whole[group] = self.stays.get((group, use), use)
        size = self.blocks.groups[group].bytes
        self.free -= size
        route, arrival, delay = self._route(group, size, issue)
        if delay:
            other = "cpu" if route == "gpu" else "gpu"
            self.link_free[other] += delay
        if route == "cpu_shard":
            copied = max(self.now, self.link_free.get("cpu", 0.0)) + self._timing(group).shard_copy_us(size)
            self.link_free |= {"cpu": copied, "gpu": arrival}
        slot = -1
        if route == "nvme":
            slots = self.staged.setdefault(issue, [])
            slot = len(slots)
            slots.append(group)
            # Its last leg takes the PCIe link.
            self.link_free["cpu"] = max(self.link_free.get("cpu", 0.0), arrival)
        self.link_free[route] = arrival
        self.arrives[group] = arrival
        self.placed.append(Placed(group, route, issue, self.block_uses[use].step, at, slot, issue))

    def _route(self, group: int, size: int, issue: int) -> tuple[Route, float, float]:
        """The route on which the group arrives first, counting what the others lose: route, arrival, and
        by how much the other link's queue is delayed."""
        best, least = None, inf
        forced = self.choices.forced.get((self.pp_rank, len(self.placed)))
        wrong = ("gpu",) if group in self.choices.from_host else ("cpu_shard",)
        for route in self.choices.routes:
            ready = self.now
            if route == "cpu":
                if group not in self.choices.hosted:
                    continue
                ready = max(ready, self._published_at(group, size))
            elif (route == "nvme" and not self._has_slot(group, issue)) or route in wrong:
                continue
            begin = max(ready, self.link_free[route])
            if route == "gpu" and self.blocks.groups[group].algorithm is None:
                begin = max(begin, self.reduced)
            if route == "cpu_shard":
                us, delay = self._by_shard(group, size) - begin, 0.0
            else:
                alone_us = self._timing(group).unshard_us(route, size, self.blocks.groups[group].algorithm)
                us, delay = self._beside(route, size, begin, alone_us)
            found = route, begin + us, delay
            if route == forced:
                return found
            if begin + us + delay < least:
                best, least = found, begin + us + delay
        assert best is not None, "every group has a route"
        return best

    def _by_shard(self, group: int, size: int) -> float:
        """When a group is whole whose shards are copied from the host and gathered, piece after piece."""
        own, pieces = self._timing(group), shard_pieces(size)
        gather_us, copy_us = own.unshard_us("cpu_shard", size), own.shard_copy_us(size)
        begin = max(self.now, self.link_free.get("cpu", 0.0))
        gathered = max(begin + copy_us / pieces, self.link_free.get("gpu", 0.0)) + gather_us
        return max(gathered, begin + copy_us + gather_us / pieces)

    def _timing(self, group: int) -> Timing:
        return self.timing.among(self.blocks.groups[group].ranks)

    def _has_slot(self, group: int, issue: int) -> bool:
        staged = self.staged.get(issue, ())
        return group in self.choices.staged and len(staged) < self.workload.limits.nvme_slots and group not in staged

    def _published_at(self, group: int, size: int) -> float:
        ready = self.published.get(group)
        if ready is None:
            ready = self.publish_free + self._timing(group).publish_us(self.pp_rank, ("cpu",), size)
            self.published[group] = self.publish_free = ready
        return ready

    def _beside(self, route: str, size: int, begin: float, us: float) -> tuple[float, float]:
        """What a gather takes that would take ``us`` alone, if the other link is still busy when it
        begins, and what the other loses meanwhile."""
        mine, other = (GPU, CPU) if route == "gpu" else (CPU, GPU)
        overlap = self.link_free.get("cpu" if mine == GPU else "gpu", 0.0) - begin
        if overlap <= 0 or not (self.timing.disturbed[mine] or self.timing.disturbed[other]):
            return us, 0.0
        slower = 1.0 + self.timing.excess(mine, size)[other]
        shared = min(overlap, us * slower)
        others = self.timing.excess(other, size)[mine]
        return us + shared * (1.0 - 1.0 / slower), shared * others / (1.0 + others)


def place_gathers(workload: Workload, timing: Timing, blocks: Blocks, choices: Choices) -> Plan:
    """Run the placement pass of all ranks through one iteration."""
    parallel = workload.parallel
    pp, last = parallel.pp, parallel.pp * parallel.vp - 1
    placements = [RankPlacement(workload, timing, blocks, choices, rank) for rank in range(pp)]
    order = steps_of_ranks(parallel)
    position = [0] * pp
    done: dict[tuple, float] = {}
    waiting: dict[tuple, int] = {}
    for one in placements:
        one.start()
    ready = list(range(pp - 1, -1, -1))
    while ready:  # ends: a rank comes back once for each step that it waited for
        rank = ready.pop()
        steps = order[rank]
        while position[rank] < len(steps):  # ends: each turn raises the position or breaks
            step = steps[position[rank]]
            stage, kind, microbatch = step
            source = (stage - 1 if kind == "F" else stage + 1, kind, microbatch)
            begin = 0.0
            if 0 <= source[0] <= last:
                arrival = done.get(source)
                if arrival is None:
                    waiting[source] = rank
                    break
                begin = arrival + (timing.p2p_us if source[0] % pp != rank else 0.0)
            done[step] = placements[rank].run_step(position[rank], begin)
            position[rank] += 1
            if step in waiting:
                ready.append(waiting.pop(step))
    return Plan(
        [one.placed for one in placements],
        [one.freed for one in placements],
        max(max(one.now, one.reduced) for one in placements),
    )
