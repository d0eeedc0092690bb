"""The hybrid policy: placement passes with different choices; the best are simulated, then improved locally.

The effort is counted in simulated steps and not in seconds, so the same inputs give the same plan on every machine.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product, zip_longest
from math import inf
from typing import NamedTuple

import msgspec

from megatron_ext.bounds.feasibility import pinned_need
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.blocks import Blocks, block_uses_of_rank, cut_by_layer, cut_evenly, cut_within, make_blocks
from megatron_ext.planner.link_split import splitter
from megatron_ext.planner.pipelined_groups import pipelined_cut
from megatron_ext.planner.placement import Choices, place_gathers
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.simulation import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Parameter, Workload

EFFORT = {1: 400_000, 2: 400_000, 3: 1_200_000}
"""By zero stage: steps, block uses and gathers that one search may place and simulate."""

CLOSE_ENOUGH = 5e-4
"""A plan this near to the proven bound, relatively, is not searched further (small cases: proven)."""

LEAST_CANDIDATES = 4
"""Candidates that are tried at least, however large the workload."""


ESTIMATED_ROUNDS = 2
"""Rounds of ``microbatch_group_size`` micro-batches in an estimate; further rounds repeat the same steps."""


def number_of_steps(workload: Workload) -> int:
    """Steps of all pipeline ranks in one iteration."""
    return 2 * workload.parallel.pp * workload.parallel.vp * workload.parallel.num_microbatches


def shortened(workload: Workload) -> Workload:
    """The same workload with at most :data:`ESTIMATED_ROUNDS` rounds of micro-batches."""
    parallel = workload.parallel
    most = ESTIMATED_ROUNDS * parallel.microbatch_group_size
    if parallel.num_microbatches <= most or number_of_steps(workload) <= POLISHED_STEPS:
        return workload
    return msgspec.structs.replace(workload, parallel=msgspec.structs.replace(parallel, num_microbatches=most))


Place = Callable[[tuple[Group, ...]], tuple[Group, ...] | None]
"""Decides for groups where their shards rest and how their gradients are kept; None where memory is short."""


RELIEF_WEIGHT = 0.01
"""Of two plans within this share, the one that relieves less counts as better: each relieved gradient is allocated,
cleared and added up once more a visit, which the simulator does not count."""


def relieved_share(groups: Sequence[Group]) -> float:
    """By bytes, the share of groups whose gradients come and go, and that of shards in host memory; 2 at most."""
    relieved = sum(g.bytes * ((g.gradients is not None) + (g.shard_rests is not None)) for g in groups)
    return relieved / (sum(group.bytes for group in groups) or 1)


class Search:
    """Tries choices, keeps the best schedule by simulated iteration time.

    Args:
        place: of the groups of every candidate; by default everything stays on the device.
        cuts: ways to cut beside :func:`cuttings`; the best settings of each are simulated, whatever their estimates.
    """

    def __init__(
        self,
        workload: Workload,
        timing: Timing,
        routes: tuple[Route, ...],
        bound_us: float,
        place: Place | None = None,
        cuts: Sequence[list[list[int]]] = (),
    ):
        self.workload, self.timing, self.routes, self.bound_us = workload, timing, routes, bound_us
        self.place, self.cuts = place, cuts
        self.steps = number_of_steps(workload)
        self.effort = EFFORT[workload.zero_stage]
        self.tried = 0
        self.best_us = self.best_mark = inf
        self.best: Schedule | None = None

    def spent(self) -> bool:
        near = self.best_us <= self.bound_us * (1 + (1e-9 if is_tiny(self.workload) else CLOSE_ENOUGH))
        return near or (self.effort <= 0 and self.tried >= LEAST_CANDIDATES)

    def schedule(self, blocks: Blocks, choices: Choices) -> Schedule:
        plan = place_gathers(self.workload, self.timing, blocks, choices)
        return assemble(self.workload, blocks.groups, plan.placed, plan.freed, planner="hybrid")

    def judge(self, schedule: Schedule) -> float:
        """Simulated iteration time; counts against the effort."""
        self.tried += 1
        unshards = sum(len(r.start.unshard) + sum(len(e.unshard) for e in r.steps) for r in schedule.ranks)
        self.effort -= self.steps + 4 * unshards
        return run(self.workload, self.timing, schedule, bound_us=0.0).iteration_time_us

    def time_of(self, blocks: Blocks, choices: Choices) -> float:
        """Simulated iteration time with these choices; the best schedule so far is kept."""
        self.effort -= self.steps  # the placement pass
        schedule = self.schedule(blocks, choices)
        us = self.judge(schedule)
        mark = us * (1 + RELIEF_WEIGHT * relieved_share(schedule.groups))
        if mark < self.best_mark * (1 - 1e-9):
            self.best_mark, self.best_us, self.best = mark, us, schedule
        return us


def fits(workload: Workload, blocks: Blocks) -> bool:
    """Whether every block fits on its device."""
    limit = workload.limits.whole_parameter_bytes
    if limit is None:
        return True
    if workload.zero_stage == 3:
        return all(block.bytes <= limit for block in blocks.blocks)
    totals = [0] * workload.parallel.pp
    for group in blocks.groups:
        totals[group.pp_rank] += group.bytes
    return max(totals) <= limit


def is_tiny(workload: Workload) -> bool:
    """Few enough steps that a solver may look at all of them."""
    return number_of_steps(workload) <= 48


def hosted_groups(workload: Workload, blocks: Blocks, order: int = 0) -> frozenset[int]:
    """Groups that may have a host copy: all, or as many as fit the pinned memory.

    ``order`` says who comes first: 0 the first groups of every rank, 1 the first ranks, 2 the
    last ranks, 3 the largest groups.
    """
    limit = workload.limits.pinned_host_bytes
    groups = blocks.groups
    routed = ["cpu"] * len(groups)
    if limit is None or max(pinned_need(workload, groups, routed), default=0) <= limit:
        return frozenset(range(len(groups)))
    place, seen = {}, {}
    for g, group in enumerate(groups):
        stage = (group.model_chunk_id, group.pp_rank)
        place[g] = seen[stage] = seen.get(stage, -1) + 1
    keys = (
        lambda g: (groups[g].model_chunk_id, place[g], groups[g].pp_rank, g),
        lambda g: (groups[g].pp_rank, groups[g].model_chunk_id, place[g], g),
        lambda g: (-groups[g].pp_rank, groups[g].model_chunk_id, place[g], g),
        lambda g: (-groups[g].bytes, groups[g].model_chunk_id, place[g], groups[g].pp_rank, g),
    )
    routed = ["gpu"] * len(groups)
    chosen = set()
    # Staging slots are pinned too: reserve bytes for them where they may be used.
    reserve = workload.limits.nvme_slots * (workload.limits.nvme_slot_bytes or 0) * workload.parallel.node_size
    for group in sorted(range(len(groups)), key=keys[order]):
        routed[group] = "cpu"
        if max(pinned_need(workload, groups, routed)) + reserve > limit:
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
    if (
        limits.pinned_host_bytes is not None
        and max(pinned_need(workload, blocks.groups, routed)) > limits.pinned_host_bytes
    ):
        return frozenset()
    return frozenset(usable)


PARTS_OF_LIMIT = (1, 2, 3, 4)
"""Where device memory is limited, blocks as large as these parts of the limit are tried, too."""


def cuttings(workload: Workload, timing: Timing, routes: tuple[Route, ...]) -> Iterator[list[list[int]]]:
    """Ways to cut all chunks into blocks, without repetitions.

    Whole; in 2, 4, ... parts of about equal bytes; by layer; the fewest blocks that the limit of device memory, or a
    part of it, holds; and the first chunk finer than the others (by layer, and by dynamic programming), which
    starts the first compute early at few calls. By layer every workload fits that fits at all.
    """
    deepest = max(chunk.num_layers for chunk in workload.chunks)
    limit = workload.limits.whole_parameter_bytes if workload.zero_stage == 3 else None
    chunks, seen = workload.chunks, []
    found = [[cut_evenly(chunk, 2**n) for chunk in chunks] for n in range((deepest - 1).bit_length())]
    found.append([cut_by_layer(chunk) for chunk in chunks])
    if limit is not None and deepest > 1:
        found += [[cut_within(workload, chunk, limit / part) for chunk in chunks] for part in PARTS_OF_LIMIT]
    if deepest > 1:
        found.append([cut_by_layer(chunk) if chunk.model_chunk_id == 0 else [0] for chunk in chunks])
        found.append(_pipelined(workload, timing, routes) or [])
    for cut in found:
        if cut and cut not in seen:
            seen.append(cut)
            yield cut


def _pipelined(workload: Workload, timing: Timing, routes: tuple[Route, ...]) -> list[list[int]] | None:
    """Groups that let the first chunk's gather and forward overlap best; None where not measured, or nothing to
    gather."""
    if not routes:
        return None
    route = "gpu" if "gpu" in routes else routes[0]
    limit = workload.limits.whole_parameter_bytes if workload.zero_stage == 3 else None
    try:
        return [
            pipelined_cut(timing, chunk, route, limit)
            if chunk.model_chunk_id == 0
            else [0]
            if limit is None
            else cut_within(workload, chunk, limit)
            for chunk in workload.chunks
        ]
    except InputError:
        return None


def route_sets(routes: tuple[Route, ...]) -> list[tuple[Route, ...]]:
    """Sets of routes worth trying, the richest first. A set without ``gpu`` cannot fall back on
    an all-gather, so it must be ``cpu`` alone."""
    sets: list[tuple[Route, ...]] = [routes]
    if "gpu" in routes and len(routes) > 1:
        sets.append(("gpu",))
        others: list[Route] = [route for route in routes if route != "gpu"]
        if len(others) > 1:
            sets.extend(("gpu", route) for route in others)
        if "cpu_shard" in others and "nvme" in others:
            sets.append(tuple(route for route in routes if route != "nvme"))
    if "cpu" in routes and routes != ("cpu",):
        sets.append(("cpu",))
    return sets


class Settings(NamedTuple):
    """One point of the grid that is searched: indices into the ways to cut, to divide blocks
    between links, horizons, sets of routes, and orders of giving host copies."""

    cut: int
    divide: int
    horizon: int
    routes: int
    hosts: int = 0


Divide = Callable[[list[Parameter]], list[list[Parameter]]]
"""Puts the parameters of a block into groups."""


class Grid:
    """All settings of a workload; each is estimated once."""

    def __init__(self, state: Search):
        workload, timing, routes = state.workload, state.timing, state.routes
        self.state, self.rough = state, shortened(workload)
        self.cuts = list(cuttings(workload, timing, routes))
        self.cuts += [cut for cut in state.cuts if cut not in self.cuts]
        self.divides: list[Divide | None] = [None]
        if len({*routes} - {"cpu_shard"}) > 1:
            self.divides.append(splitter(timing, tuple(route for route in routes if route != "cpu_shard")))
        limits = workload.limits
        if (
            workload.zero_stage == 3 and limits.whole_parameter_bytes is not None
        ) or limits.pinned_host_bytes is not None:
            self.divides.append(by_parameter)
        self.horizons = _horizons(workload, timing)
        self.sets = route_sets(routes)
        hosts = range(4 if workload.limits.pinned_host_bytes is not None and "cpu" in routes else 1)
        self.sizes = tuple(map(len, (self.cuts, self.divides, self.horizons, self.sets, hosts)))
        self._blocks: dict[tuple[int, int], Blocks | None] = {}
        self.estimates: dict[Settings, float] = {}
        self.refused: InputError | None = None

    def also_halved(self) -> None:
        """Let every division be tried with each of its groups cut in two of about equal bytes, too."""
        self.divides += [partial(halves, divide) for divide in self.divides]
        self.sizes = (self.sizes[0], len(self.divides), *self.sizes[2:])

    def made(self, settings: Settings) -> tuple[Blocks, Choices] | None:
        """Blocks and choices of these settings; None where they cannot work."""
        workload = self.state.workload
        key = (settings.cut, settings.divide)
        if key not in self._blocks:
            self._blocks[key] = self._placed(
                make_blocks(
                    workload, self.cuts[settings.cut], self.divides[settings.divide], self.state.timing.algorithm
                )
            )
        blocks, allowed = self._blocks[key], self.sets[settings.routes]
        if blocks is None:
            return None
        hosted = hosted_groups(workload, blocks, settings.hosts) if "cpu" in allowed else frozenset()
        staged = staged_groups(workload, blocks, hosted) if "nvme" in allowed else frozenset()
        from_host = frozenset(g for g, group in enumerate(blocks.groups) if group.shard_rests == "host")
        gathered = {g for g in range(len(blocks.groups)) if ("cpu_shard" if g in from_host else "gpu") in allowed}
        if not fits(workload, blocks) or len(gathered | hosted) < len(blocks.groups):
            return None
        return blocks, Choices(self.horizons[settings.horizon], allowed, hosted, staged, from_host=from_host)

    def _placed(self, blocks: Blocks) -> Blocks | None:
        """``blocks`` with their groups as the search's ``place`` says."""
        groups = blocks.groups if self.state.place is None else self.state.place(blocks.groups)
        return None if groups is None else blocks._replace(groups=groups)

    def estimate(self, settings: Settings) -> float:
        """Estimated end of the last step, by a placement pass of the :func:`shortened` workload."""
        workload = self.rough
        if settings not in self.estimates:
            made = self.made(settings)
            if made is None:
                self.estimates[settings] = inf
            else:
                self.state.effort -= (
                    number_of_steps(workload) + 2 * sum(map(len, made[0].of_stage)) * workload.parallel.num_microbatches
                )
                try:
                    self.estimates[settings] = place_gathers(workload, self.state.timing, *made).end_us
                except InputError as error:  # a group of a size that was not measured
                    self.estimates[settings] = inf
                    self.refused = self.refused or error
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
            while changed:  # ends: each change has a lower estimate, and there are finitely many settings
                changed = False
                for axis in (2, 3, 4, 0, 1):
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
    if workload.zero_stage < 3 and not workload.limits.nvme_slots:
        return [inf]
    layers = [us for row in timing.layers for times in row for us in times.forward]
    found = [sum(layers) / len(layers)]
    total = sum(layers) * 3 * workload.parallel.num_microbatches / workload.parallel.pp
    while found[-1] < total:  # ends: total is finite and found[0] is positive, or both are 0
        found.append(found[-1] * 2**0.5)
    return [0.0, *found, inf]


def by_parameter(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Every parameter that is not small beside the others a group of its own, so that a part of a
    layer can stay on the device, or have a host copy; the small ones together."""
    threshold = sum(p.bytes for p in parameters) / 16
    large = [[p] for p in parameters if p.bytes >= threshold]
    small = [p for p in parameters if p.bytes < threshold]
    return large + ([small] if small else [])


def halves(divide: Divide | None, parameters: list[Parameter]) -> list[list[Parameter]]:
    """The groups of ``divide``, or one of all, each cut in two of about equal bytes."""
    found = []
    for part in [parameters] if divide is None else divide(parameters):
        whole = sum(p.bytes for p in part)
        ends = range(1, len(part))
        middle = min(ends, key=lambda end: abs(2 * sum(p.bytes for p in part[:end]) - whole), default=0)
        found += [half for half in (part[:middle], part[middle:]) if half]
    return found


SIMULATED = 8
"""Best settings by estimate that the simulator judges."""


POLISHED = 4
"""The best of those; their decisions are then changed one by one."""

POLISHED_STEPS = 2048
"""With more steps than this one decision is too small a part of the whole to be worth a simulation."""


def search(
    workload: Workload,
    timing: Timing,
    routes: tuple[Route, ...],
    bound_us: float = 0.0,
    place: Place | None = None,
    effort: float = 1.0,
    cuts: Sequence[list[list[int]]] = (),
) -> tuple[Schedule, float]:
    """The best schedule found, and its simulated iteration time.

    Args:
        place, cuts: see :class:`Search`.
        effort: part of the usual effort.

    Raises:
        InputError: no groups can be gathered within the limits and the measured sizes.
    """
    state = Search(workload, timing, routes, bound_us, place, cuts)
    state.effort = int(state.effort * effort)
    grid = Grid(state)
    grid.descend()
    if all(us == inf for us in grid.estimates.values()):
        raise grid.refused or InputError("cannot fit: no route can bring every group within the limits", field="limits")
    state.effort = max(state.effort, int(EFFORT[workload.zero_stage] * effort) // 4)
    judged = []
    own = [index for index, cut in enumerate(grid.cuts) if cut in state.cuts]
    for settings in _to_judge(grid.estimates, own):
        if judged and state.spent():
            break
        made = grid.made(settings)
        assert made is not None  # its estimate is finite
        blocks, choices = made
        judged.append((state.time_of(blocks, choices), len(judged), blocks, choices))
    for us, _, blocks, choices in sorted(judged)[: POLISHED if state.steps <= POLISHED_STEPS else 0]:
        _polish(state, blocks, choices, us)
    assert state.best is not None  # something was judged
    return state.best, state.best_us


def _to_judge(estimates: dict[Settings, float], own: Sequence[int] = ()) -> list[Settings]:
    """The best settings by estimate, interleaved by set of routes: an estimate knows less of contention than
    the simulator. Of settings with the same estimate, cut, division and host copies, one. First the best of every cut
    in ``own``."""
    first = [min((us, s) for s, us in estimates.items() if s.cut == cut) for cut in own]
    always = [settings for us, settings in first if us < inf]
    by_routes: dict[int, dict[tuple, Settings]] = {}
    for us, settings in sorted((us, settings) for settings, us in estimates.items() if us < inf):
        by_routes.setdefault(settings.routes, {}).setdefault(
            (us, settings.cut, settings.divide, settings.hosts), settings
        )
    interleaved = zip_longest(
        *(found.values() for found in sorted(by_routes.values(), key=lambda found: min(found)[0]))
    )
    others = [settings for row in interleaved for settings in row if settings is not None and settings not in always]
    return always + others[: SIMULATED - len(always)]


def _polish(state: Search, blocks: Blocks, choices: Choices, us: float) -> None:
    """Change one decision at a time while the simulated iteration time falls.

    A change sends one gather by another link, stops prefetching before one use, or gives or
    takes a host copy.
    """
    improved = True
    while improved and not state.spent():  # ends: each turn lowers us and tries a new plan
        improved = False
        for other in _changes(state, blocks, choices):
            if state.spent():
                return
            found = state.time_of(blocks, other)
            if found < us * (1 - 1e-9):
                choices, us, improved = other, found, True


def _changes(state: Search, blocks: Blocks, choices: Choices) -> Iterator[Choices]:
    """Neighbours of ``choices``, one decision apart."""
    workload = state.workload
    placed = place_gathers(workload, state.timing, blocks, choices).placed
    for pp_rank, mine in enumerate(placed):
        for number, item in enumerate(mine):
            for route in choices.routes:
                if route != item.route:
                    yield choices._replace(forced={**choices.forced, (pp_rank, number): route})
    limit = workload.limits.pinned_host_bytes
    if limit is not None and "cpu" in choices.routes and not choices.from_host:
        for swap in product(range(len(blocks.groups)), repeat=2):
            hosted = choices.hosted ^ frozenset(swap)
            staged = choices.staged - hosted
            # Slots of ranks that stage are pinned too.
            routed = ["cpu" if g in hosted else "nvme" if g in staged else "gpu" for g in range(len(blocks.groups))]
            if ("gpu" in choices.routes or len(hosted) == len(routed)) and max(
                pinned_need(workload, blocks.groups, routed)
            ) <= limit:
                yield choices._replace(hosted=hosted, staged=staged)
    if workload.zero_stage == 3:
        for pp_rank in range(len(placed)):
            for use in range(1, len(block_uses_of_rank(workload, state.timing, blocks, pp_rank))):
                yield choices._replace(held=choices.held ^ {(pp_rank, use)})
