"""The hybrid policy: many walks with different choices, judged by the simulator, then polished.

Nothing here looks at a clock: the effort is a number of simulated steps, so the same inputs
give the same plan on every machine.
"""

from collections.abc import Iterator
from math import inf

import msgspec

from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.blocks import Blocks, cut_evenly, make_blocks
from megatron_ext.planner.fit import pinned_need
from megatron_ext.planner.residency import Choices, walk
from megatron_ext.planner.split import splitter
from megatron_ext.schedule.model import Schedule
from megatron_ext.simulator.simulate import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.model import Workload

EFFORT = 400_000
"""Operations (turns of blocks, gathers) that one search may walk and simulate."""

CLOSE_ENOUGH = 1e-4
"""A plan this near to the proven bound, relatively, is not searched further."""

LEAST_CANDIDATES = 6
"""However large the workload, so many candidates are tried."""


class Search:
    """Tries choices, keeps the best schedule by simulated step time."""

    def __init__(self, workload: Workload, timing: Timing, routes: tuple[str, ...], bound_us: float):
        self.workload, self.timing, self.routes, self.bound_us = workload, timing, routes, bound_us
        parallel = workload.parallel
        self.steps = 2 * parallel.pp * parallel.vp * parallel.num_microbatches
        self.effort = EFFORT
        self.tried = 0
        self.best_us, self.best = inf, None
        self.best_made: tuple[Blocks, Choices] | None = None

    def spent(self) -> bool:
        near = self.best_us <= self.bound_us * (1 + CLOSE_ENOUGH)
        return near or (self.effort <= 0 and self.tried >= LEAST_CANDIDATES)

    def schedule(self, blocks: Blocks, choices: Choices) -> Schedule:
        plan = walk(self.workload, self.timing, blocks, choices)
        return assemble(self.workload, blocks.groups, plan.placed, plan.freed, planner="hybrid")

    def judge(self, schedule: Schedule) -> float:
        """Simulated step time; counts against the effort."""
        self.tried += 1
        unshards = sum(len(r.start.unshard) + sum(len(e.unshard) for e in r.steps) for r in schedule.ranks)
        self.effort -= self.steps + 4 * unshards
        return run(self.workload, self.timing, schedule, bound_us=0.0).step_time_us

    def consider(self, blocks: Blocks, choices: Choices) -> bool:
        """Walk with these choices; true where that is the best so far."""
        if not fits(self.workload, blocks):
            return False
        schedule = self.schedule(blocks, choices)
        us = self.judge(schedule)
        if us < self.best_us * (1 - 1e-9):
            self.best_us, self.best, self.best_made = us, schedule, (blocks, choices)
            return True
        return False


def fits(workload: Workload, blocks: Blocks) -> bool:
    """Whether every block fits on its device."""
    limit = workload.limits.device_bytes
    if limit is None:
        return True
    if workload.zero_stage == 3:
        return all(block.bytes <= limit for block in blocks.blocks)
    totals = [0] * workload.parallel.pp
    for block in blocks.blocks:
        totals[block.pp_rank] += block.bytes
    return max(totals) <= limit


def hosted_groups(workload: Workload, blocks: Blocks) -> frozenset[int]:
    """Groups that may have a host copy: all, or those of the earliest turns that fit the pinned memory."""
    limit = workload.limits.pinned_host_bytes
    routed = ["cpu"] * len(blocks.groups)
    if limit is None or max(pinned_need(workload, blocks.groups, routed), default=0) <= limit:
        return frozenset(range(len(blocks.groups)))
    routed = ["gpu"] * len(blocks.groups)
    chosen = set()
    # Staging slots are pinned too: leave room for them where they may be used.
    reserve = workload.limits.nvme_slots * (workload.limits.nvme_slot_bytes or 0) * workload.parallel.node_size
    by_turn = sorted(range(len(blocks.groups)), key=lambda g: (blocks.groups[g].model_chunk_id, blocks.groups[g].pp_rank, g))
    for group in by_turn:
        routed[group] = "cpu"
        if max(pinned_need(workload, blocks.groups, routed)) + reserve > limit:
            routed[group] = "gpu"
        else:
            chosen.add(group)
    return frozenset(chosen)


def staged_groups(workload: Workload, blocks: Blocks, hosted: frozenset[int]) -> frozenset[int]:
    """Groups that may go by ``nvme``: those without a host copy that fit a slot, if slots fit at all."""
    limits = workload.limits
    if not limits.nvme_slots:
        return frozenset()
    size = limits.nvme_slot_bytes
    usable = [g for g, group in enumerate(blocks.groups) if g not in hosted and (size is None or group.bytes <= size)]
    routed = ["cpu" if g in hosted else "gpu" for g in range(len(blocks.groups))]
    for group in usable:
        routed[group] = "nvme"
    if limits.pinned_host_bytes is not None and max(pinned_need(workload, blocks.groups, routed)) > limits.pinned_host_bytes:
        return frozenset()
    return frozenset(usable)


def cuttings(workload: Workload) -> Iterator[list[list[int]]]:
    """Ways to cut all chunks into blocks: whole, in 2, 4, ... parts, by layer, and (the first
    chunk by layer, the others whole), which starts the first compute early at few calls."""
    deepest = max(chunk.num_layers for chunk in workload.chunks)
    seen = []
    parts = 1
    numbers = []
    while parts < deepest:
        numbers.append(parts)
        parts *= 2
    numbers.append(deepest)
    for number in numbers:
        cut = [cut_evenly(chunk, number) for chunk in workload.chunks]
        if cut not in seen:
            seen.append(cut)
            yield cut
    if deepest > 1:
        mixed = [cut_evenly(chunk, deepest if chunk.model_chunk_id == 0 else 1) for chunk in workload.chunks]
        if mixed not in seen:
            yield mixed


def route_sets(routes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Sets of routes worth trying, the richest first. A set without ``gpu`` cannot fall back on
    an all-gather, so it must be ``cpu`` alone."""
    sets = [routes]
    if "gpu" in routes and len(routes) > 1:
        sets.append(("gpu",))
        sets += [("gpu", route) for route in routes if route != "gpu" and len(routes) > 2]
    if "cpu" in routes and routes != ("cpu",):
        sets.append(("cpu",))
    return sets


def search(workload: Workload, timing: Timing, routes: tuple[str, ...], bound_us: float = 0.0) -> tuple[Schedule | None, float]:
    """The best schedule found, and its simulated step time (None and infinity if none fits)."""
    state = Search(workload, timing, routes, bound_us)
    options = []
    for cut in cuttings(workload):
        for divide in (False, True) if len(routes) > 1 else (False,):
            options.append((cut, divide))
    horizon = inf if workload.zero_stage == 1 else _first_horizon(workload, timing, routes)
    made = {}

    def blocks_of(number: int) -> Blocks:
        if number not in made:
            cut, divide = options[number]
            made[number] = make_blocks(workload, cut, splitter(timing, routes) if divide else None)
        return made[number]

    def choices_of(blocks: Blocks, horizon_us: float, allowed: tuple[str, ...]) -> Choices | None:
        hosted = hosted_groups(workload, blocks) if "cpu" in allowed else frozenset()
        staged = staged_groups(workload, blocks, hosted) if "nvme" in allowed else frozenset()
        if "gpu" not in allowed and len(hosted) < len(blocks.groups):
            return None
        return Choices(horizon_us, allowed, hosted, staged)

    best_number = 0
    for number in range(len(options)):
        blocks = blocks_of(number)
        choices = choices_of(blocks, horizon, route_sets(routes)[0])
        if choices is not None and state.consider(blocks, choices):
            best_number = number
        if state.spent():
            break
    blocks = blocks_of(best_number)
    for allowed in route_sets(routes)[1:]:
        if state.spent():
            break
        choices = choices_of(blocks, horizon, allowed)
        if choices is not None:
            state.consider(blocks, choices)
    if state.best_made is None:
        return None, inf
    _tune_horizon(state, horizon)
    _flip_routes(state)
    return state.best, state.best_us


def _first_horizon(workload: Workload, timing: Timing, routes) -> float:
    """Time to gather two average chunks: what is under way while one computes, and one to spare."""
    sizes = [chunk.bytes for chunk in workload.chunks if chunk.parameters]
    if not sizes:
        return inf
    size = sum(sizes) // len(sizes)
    return 2.0 * min(timing.costs.estimate(f"routes.{route}", size).us for route in routes)


def _tune_horizon(state: Search, horizon: float) -> None:
    """Farther and nearer by factors of two, as long as that helps."""
    for factor in (2.0, 0.5):
        misses = 0
        value = horizon
        while misses < 2 and not state.spent() and state.best_made is not None and 0 < value < inf:
            value *= factor
            blocks, choices = state.best_made
            misses = 0 if state.consider(blocks, choices._replace(horizon_us=value)) else misses + 1
            if value > 1e12 or value < 1e-3:
                break
    if not state.spent():
        blocks, choices = state.best_made
        if choices.horizon_us != inf:
            state.consider(blocks, choices._replace(horizon_us=inf))


def _flip_routes(state: Search) -> None:
    """Send single gathers by another link while that helps."""
    blocks, choices = state.best_made
    if len(choices.routes) < 2:
        return
    improved = True
    while improved and not state.spent():
        improved = False
        blocks, choices = state.best_made
        unshards = [
            (rank.pp_rank, number, action.route)
            for rank in state.best.ranks
            for number, action in enumerate(a for actions in (rank.start, *rank.steps) for a in actions.unshard)
        ]
        for pp_rank, number, route in unshards:
            for other in choices.routes:
                if other == route or state.spent():
                    continue
                forced = {**state.best_made[1].forced, (pp_rank, number): other}
                if state.consider(blocks, choices._replace(forced=forced)):
                    improved = True
                    break


def named(schedule: Schedule, planner: str) -> Schedule:
    """The schedule under another planner's name."""
    return msgspec.structs.replace(schedule, metadata=msgspec.structs.replace(schedule.metadata, planner=planner))
