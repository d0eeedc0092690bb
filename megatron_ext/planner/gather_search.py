"""The search. Placement passes estimate ways to cut, keep and place groups. The best are simulated, and their gathers
are sent by other routes one at a time.

The effort is counted in simulated steps and not in seconds, so the same inputs give the same plan on every machine.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import zip_longest
from math import inf
from typing import NamedTuple

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.blocks import Blocks, Divide
from megatron_ext.planner.effort import (
    CLOSE_ENOUGH,
    EFFORT,
    LEAST_CANDIDATES,
    SMALL_STEPS,
    is_tiny,
    judged_us,
    marked,
    number_of_steps,
    shortened,
    visits_of_gradients,
)
from megatron_ext.planner.link_split import splitter
from megatron_ext.planner.passes.cut_groups import by_parameter, cut_groups, cuttings, fits
from megatron_ext.planner.passes.place_gathers import Choices, GatherPlacer, Placement
from megatron_ext.planner.place_choices import choices_of, horizons, route_sets
from megatron_ext.planner.problem import Problem
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.workload.route import kind_of
from megatron_ext.workload.workload import Workload

SIMULATED = 8
"""How many of the best points of the grid by estimate the simulator judges."""

REROUTED = 4
"""How many of the best simulated points are improved by sending gathers by other routes, one at a time."""

FRUITLESS = 3
"""After this many starts in a row that led to nothing better, no further one is tried. Starts before the first one
that can be estimated do not count."""

Offload = Callable[[tuple[Group, ...]], tuple[Group, ...] | None]
"""The pass that decides for groups where their shards rest and how their gradients are kept. It returns None if memory
is short."""


class GridPoint(NamedTuple):
    """One point of the grid that is searched: indices into the ways to cut chunks, the ways to divide blocks between
    links, the horizons, the sets of routes, and the orders of assigning host copies."""

    cut: int
    divide: int
    horizon: int
    routes: int
    hosts: int = 0


class Grouping(NamedTuple):
    """Groups as they are cut and kept, and the choices that a placement pass has."""

    blocks: Blocks
    choices: Choices


class GatherSearch:
    """All points of a workload's grid. Estimates each point once, simulates some of them, and keeps the best schedule.

    Args:
        offload: applied to the groups of every candidate; by default everything stays on the device.
        effort: share of the usual effort.
    """

    def __init__(self, problem: Problem, offload: Offload | None = None, effort: float = 1.0):
        workload, timing, routes, self.bound_us, *_ = problem
        self.workload, self.timing, self.offload = workload, timing, offload
        self.rough, self.steps = shortened(workload), number_of_steps(workload)
        self.cuts = list(cuttings(workload))
        self.divides: list[Divide | None] = [None]
        links = tuple(route for route in routes if not kind_of(route).shard_from_host)
        if len(links) > 1:
            self.divides.append(splitter(timing, links))
        limits = workload.limits
        if workload.streamed_bytes is not None or limits.pinned_host_bytes is not None:
            self.divides.append(by_parameter)
        self.horizons, self.sets = horizons(workload, timing), route_sets(routes)
        self.middle = min(6, len(self.horizons) - 1)  # looks about eight layers ahead
        orders = 5 if limits.host_bytes is not None and workload.optimizer.on_host else 4
        limited = limits.pinned_host_bytes is not None or limits.host_bytes is not None
        copied = any(kind_of(route).reads_host_copy for route in routes)
        self.hosts = range(orders if limited and copied else 1)
        self.sizes = GridPoint(*map(len, (self.cuts, self.divides, self.horizons, self.sets, self.hosts)))
        self.full_effort = int(EFFORT[workload.zero_stage] * effort)
        self.effort, self.tried = self.full_effort, 0
        self.estimates: dict[GridPoint, float] = {}
        self.best_us = self.best_mark = inf
        self.best: Schedule | None = None
        self.refused: InputError | None = None
        self._blocks, self._grouped = cache(self._cut), cache(self._group)
        self._equal: dict[Blocks, Blocks] = {}
        self._ends: dict[tuple, list[tuple[float, float, float]]] = {}
        # The placement passes of a few groupings are kept for reuse.
        self._placer = lru_cache(4)(lambda own, few: GatherPlacer(self.rough if few else workload, timing, own))

    def made(self, point: GridPoint) -> Grouping | None:
        """Blocks and choices of this point, by the passes cut and offload; None if it cannot work."""
        made, _ = self._grouped(point._replace(horizon=0))
        return made and made._replace(choices=made.choices._replace(horizon_us=self.horizons[point.horizon]))

    def _group(self, point: GridPoint) -> tuple[Grouping | None, list[tuple[float, float, float]]]:
        """What :meth:`made` returns, but for the horizon; and what is known of points that give the placement pass the
        same groups with the same routes: two horizons, and the estimated end with any horizon between them."""
        blocks = self._blocks(point.cut, point.divide)
        if blocks is None:
            return None, []
        choices = choices_of(self.workload, blocks, 0.0, self.sets[point.routes], point.hosts)
        made = grouping_of(self.workload, blocks, choices)
        if made is None:
            return None, []
        routes = tuple(map(made.choices.ways, range(len(blocks.groups))))
        return made, self._ends.setdefault((id(blocks), routes), [])

    def _cut(self, cut: int, divide: int) -> Blocks | None:
        """The same object for all ways to cut and to divide that give the same blocks."""
        blocks = cut_groups(self.workload, self.timing, self.cuts[cut], self.divides[divide])
        groups = blocks.groups if self.offload is None else self.offload(blocks.groups)
        if groups is None:
            return None
        blocks = blocks._replace(groups=groups)
        return self._equal.setdefault(blocks, blocks)

    def _place(self, given: Grouping, workload: Workload) -> Placement:
        """Run the pass place for the complete workload or for the :func:`shortened` one."""
        return self._placer(given.blocks, workload is self.rough).place(given.choices)

    def estimate(self, point: GridPoint) -> float:
        """Estimated end of the last step in microseconds, by a placement pass over the :func:`shortened` workload;
        infinite if there is none."""
        if point not in self.estimates:
            self.estimates[point] = self._estimated(point)
        return self.estimates[point]

    def _estimated(self, point: GridPoint) -> float:
        given, ends = self.made(point), self._grouped(point._replace(horizon=0))[1]
        if given is None:
            return inf
        blocks = sum(map(len, given.blocks.of_stage))
        self.effort -= number_of_steps(self.rough) + 2 * blocks * self.rough.parallel.num_microbatches
        for least, most, us in ends:
            if least <= given.choices.horizon_us <= most:
                return us
        try:
            plan = self._place(given, self.rough)
        except InputError as error:  # the size of a group was not measured
            self.refused = self.refused or error
            return inf
        ends.append((*plan.alike, plan.end_us))
        return plan.end_us

    def descend(self) -> None:
        """Start from every way to cut with every division, the best first. Look for better points one axis at a time,
        until nothing changes. End if :data:`FRUITLESS` starts have found nothing better, or if the effort is spent."""
        starts = [GridPoint(c, d, self.middle, 0) for c in range(len(self.cuts)) for d in range(len(self.divides))]
        for start in starts:
            self.estimate(start)
        lowest_us, fruitless = inf, 0
        for start in sorted(starts, key=lambda s: (self.estimates[s], s)):
            best, changed = start, True
            while changed:  # ends: each change has a lower estimate, and there are finitely many points
                changed = False
                for axis in ("horizon", "routes", "hosts", "cut", "divide"):
                    for index in self._indices(axis, best):
                        if self.effort <= 0:
                            return
                        other = best._replace(**{axis: index})
                        if self.estimate(other) < self.estimates[best] * (1 - 1e-9):
                            best, changed = other, True
            if self.estimates[best] < lowest_us * (1 - 1e-9):
                fruitless = 0
            elif lowest_us < inf:
                fruitless += 1
            lowest_us = min(lowest_us, self.estimates[best])
            if fruitless == FRUITLESS:
                return

    def _indices(self, axis: str, point: GridPoint) -> Sequence[int]:
        """Indices to try along one axis: all of them, but of the many horizons only nearby ones and the last one."""
        size = getattr(self.sizes, axis)
        if axis != "horizon":
            return range(size)
        near = [point.horizon + distance for distance in (1, -1, 2, -2, 4, -4)]
        return [index for index in (*near, size - 1) if 0 <= index < size]

    def spent(self) -> bool:
        near = self.best_us <= self.bound_us * (1 + (1e-9 if is_tiny(self.workload) else CLOSE_ENOUGH))
        return near or (self.effort <= 0 and self.tried >= LEAST_CANDIDATES)

    def time_of(self, given: Grouping) -> float:
        """Simulated iteration time in microseconds with these choices; infinite if a node's host memory is short. Keeps
        the best schedule so far."""
        self.effort -= self.steps  # the placement pass
        try:
            plan = self._place(given, self.workload)
            schedule = assemble(self.workload, given.blocks.groups, plan.placed, plan.freed, planner="hybrid")
            us = judged_us(self.workload, self.timing, schedule)
        except InputError as error:
            self.refused = error
            return inf
        self.tried += 1
        visits = visits_of_gradients(self.workload, schedule.groups)
        self.effort -= self.steps + 4 * (sum(map(len, plan.placed)) + visits)
        mark = marked(us, schedule)
        if mark < self.best_mark * (1 - 1e-9):
            self.best_mark, self.best_us, self.best = mark, us, schedule
        return us

    def reroute(self, given: Grouping, us: float) -> None:
        """Send one gather at a time by another route, as long as the simulated iteration time falls."""
        improved = True
        while improved and not self.spent():  # ends: each turn lowers us and tries a new plan
            improved, best = False, given
            for choices in _other_routes(given.choices, self._place(given, self.workload)):
                if self.spent():
                    return
                other = given._replace(choices=choices)
                found = self.time_of(other)
                if found < us * (1 - 1e-9):
                    best, us, improved = other, found, True
            given = best


def _other_routes(choices: Choices, plan: Placement) -> Iterator[Choices]:
    """Choices that send one of the gathers of ``plan`` by another route. ``choices`` are those that led to ``plan``."""
    for pp_rank, mine in enumerate(plan.placed):
        for number, item in enumerate(mine):
            for route in choices.routes:
                if route != item.route and ((pp_rank, number) in choices.forced or choices.may_take(route, item.group)):
                    yield choices._replace(forced={**choices.forced, (pp_rank, number): route})


def grouping_of(workload: Workload, blocks: Blocks, choices: Choices) -> Grouping | None:
    """Blocks and choices, as far as the groups' shards allow them; None if a block or a group has no room or no
    route."""
    every = range(len(blocks.groups))
    routes = [route for route in choices.routes if not kind_of(route).staged]
    if not fits(workload, blocks) or not all(any(choices.may_take(route, g) for route in routes) for g in every):
        return None
    return Grouping(blocks, choices)


def search(problem: Problem, **how) -> tuple[Schedule, float]:
    """The best schedule found, and its simulated iteration time. Arguments: see :class:`GatherSearch`.

    Raises:
        InputError: no groups can be gathered within the limits and the measured sizes.
    """
    grid = GatherSearch(problem, **how)
    grid.descend()
    grid.effort = max(grid.effort, grid.full_effort // 4)
    judged = []
    for number, point in enumerate(_to_judge(grid.estimates)):
        if number and grid.spent():
            break
        made = grid.made(point)
        assert made is not None  # its estimate is finite
        judged.append((grid.time_of(made), number, made))
    for us, _, made in sorted(judged)[: REROUTED if grid.steps <= SMALL_STEPS else 0]:
        grid.reroute(made, us)
    if grid.best is None:
        raise grid.refused or InputError("cannot fit: no route can bring every group within the limits", field="limits")
    return grid.best, grid.best_us


def _to_judge(estimates: dict[GridPoint, float]) -> list[GridPoint]:
    """The best points by estimate, taken in turn from each set of routes, because an estimate models contention less
    well than the simulator. Of points with the same estimate, cut, division and host copies only one is kept."""
    by_routes: dict[int, dict[tuple, GridPoint]] = {}
    for us, point in sorted((us, point) for point, us in estimates.items() if us < inf):
        key = us, point.cut, point.divide, point.hosts
        by_routes.setdefault(point.routes, {}).setdefault(key, point)
    ranked = sorted(by_routes.values(), key=lambda found: min(found)[0])
    interleaved = zip_longest(*(found.values() for found in ranked))
    return [point for row in interleaved for point in row if point is not None][:SIMULATED]
