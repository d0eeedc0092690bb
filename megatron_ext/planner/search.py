"""The hybrid policy: many walks with different choices, judged by the simulator, then polished.

Nothing here looks at a clock: the effort is a number of simulated steps, so the same inputs
give the same plan on every machine.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.blocks import Blocks, cut_evenly, make_blocks
from megatron_ext.planner.fit import pinned_need
from megatron_ext.planner.residency import Choices, walk
from megatron_ext.planner.split import splitter
from megatron_ext.schedule.model import Schedule
from megatron_ext.simulator.simulate import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.model import Parameter, Workload

EFFORT = {1: 600_000, 3: 2_400_000}
"""By zero stage: steps, turns of blocks and gathers that one search may walk and simulate."""

CLOSE_ENOUGH = 1e-4
"""A plan this near to the proven bound, relatively, is not searched further."""

LEAST_CANDIDATES = 4
"""However large the workload, so many candidates are tried."""


class Search:
    """Tries choices, keeps the best schedule by simulated step time."""

    def __init__(self, workload: Workload, timing: Timing, routes: tuple[str, ...], bound_us: float):
        self.workload, self.timing, self.routes, self.bound_us = workload, timing, routes, bound_us
        parallel = workload.parallel
        self.steps = 2 * parallel.pp * parallel.vp * parallel.num_microbatches
        self.effort = EFFORT[workload.zero_stage]
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


class Settings(NamedTuple):
    """One point of the grid that is searched: indices into the ways to cut, to divide blocks
    between links, horizons, and sets of routes."""

    cut: int
    divide: int
    horizon: int
    routes: int


class Grid:
    """All settings of a workload; walks are estimated once and remembered."""

    def __init__(self, state: Search):
        workload, timing, routes = state.workload, state.timing, state.routes
        self.state = state
        self.cuts = list(cuttings(workload))
        self.divides = [None]
        if len(routes) > 1:
            self.divides.append(splitter(timing, routes))
        if workload.zero_stage == 3 and workload.limits.device_bytes is not None:
            self.divides.append(by_parameter)
        self.horizons = _horizons(workload, timing)
        self.sets = route_sets(routes)
        self.sizes = tuple(map(len, (self.cuts, self.divides, self.horizons, self.sets)))
        self._blocks: dict[tuple[int, int], Blocks] = {}
        self.estimates: dict[Settings, float] = {}

    def made(self, settings: Settings) -> tuple[Blocks, Choices] | None:
        """Blocks and choices of these settings; None where they cannot work."""
        workload = self.state.workload
        key = (settings.cut, settings.divide)
        if key not in self._blocks:
            self._blocks[key] = make_blocks(workload, self.cuts[settings.cut], self.divides[settings.divide])
        blocks, allowed = self._blocks[key], self.sets[settings.routes]
        hosted = hosted_groups(workload, blocks) if "cpu" in allowed else frozenset()
        staged = staged_groups(workload, blocks, hosted) if "nvme" in allowed else frozenset()
        if not fits(workload, blocks) or ("gpu" not in allowed and len(hosted) < len(blocks.groups)):
            return None
        return blocks, Choices(self.horizons[settings.horizon], allowed, hosted, staged)

    def estimate(self, settings: Settings) -> float:
        """Estimated end of the last step, by a walk."""
        workload = self.state.workload
        if settings not in self.estimates:
            made = self.made(settings)
            if made is None:
                self.estimates[settings] = inf
            else:
                self.state.effort -= self.state.steps + 2 * sum(map(len, made[0].of_stage)) * workload.parallel.num_microbatches
                self.estimates[settings] = walk(workload, self.state.timing, *made).end_us
        return self.estimates[settings]

    def descend(self) -> None:
        """From every way to cut with every division, best first: better settings one axis at a
        time, until nothing changes or the effort is spent."""
        middle = min(6, self.sizes[2] - 1)  # looks about eight layers ahead
        starts = [Settings(c, d, middle, 0) for c in range(self.sizes[0]) for d in range(self.sizes[1])]
        for start in starts:
            self.estimate(start)
        for start in sorted(starts, key=lambda s: (self.estimates[s], s)):
            best, changed = start, True
            while changed:
                changed = False
                for axis in (2, 3, 0, 1):
                    for value in self._values(axis, best):
                        if self.state.effort <= 0:
                            return
                        other = best._replace(**{Settings._fields[axis]: value})
                        if self.estimate(other) < self.estimates[best] * (1 - 1e-9):
                            best, changed = other, True

    def _values(self, axis: int, settings: Settings) -> Sequence[int]:
        """What to try along one axis: all, but of the many horizons only nearby ones and the last."""
        size = self.sizes[axis]
        if axis != 2:
            return range(size)
        near = [settings.horizon + d for d in (1, -1, 2, -2, 4, -4)]
        return [value for value in (*near, size - 1) if 0 <= value < size]


def _horizons(workload: Workload, timing: Timing) -> list[float]:
    """Times to look ahead, by factors of about 1.4 from one layer's compute to everything."""
    if workload.zero_stage == 1 and not workload.limits.nvme_slots:
        return [inf]
    layers = [us for row in timing.layers for times in row for us in times.forward]
    found = [sum(layers) / len(layers)]
    total = sum(layers) * 3 * workload.parallel.num_microbatches / workload.parallel.pp
    while found[-1] < total:
        found.append(found[-1] * 2**0.5)
    return [0.0, *found, inf]


def by_parameter(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Every parameter that is not small beside the others a group of its own, so that a part of a
    layer can stay; the small ones together."""
    threshold = sum(p.bytes for p in parameters) / 16
    large = [[p] for p in parameters if p.bytes >= threshold]
    small = [p for p in parameters if p.bytes < threshold]
    return large + ([small] if small else [])


SIMULATED = 4
"""Best settings by estimate that the simulator judges."""


def search(workload: Workload, timing: Timing, routes: tuple[str, ...], bound_us: float = 0.0) -> tuple[Schedule | None, float]:
    """The best schedule found, and its simulated step time (None and infinity if none fits)."""
    state = Search(workload, timing, routes, bound_us)
    grid = Grid(state)
    grid.descend()
    ranked = sorted((us, settings) for settings, us in grid.estimates.items() if us < inf)
    state.effort = max(state.effort, EFFORT[workload.zero_stage] // 4)
    for _, settings in ranked[:SIMULATED]:
        if state.best is not None and state.spent():
            break
        state.consider(*grid.made(settings))
    if state.best_made is None:
        return None, inf
    _flip_routes(state)
    return state.best, state.best_us


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
