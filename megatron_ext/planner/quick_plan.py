"""A good plan in a fraction of a second: rules and a few placement passes instead of a search, on few micro-batches.

[Note: Few micro-batches]
In the steady state of a pipeline every further round of micro-batches takes as long as the one before. Therefore an
iteration of many rounds is simulated with two and with three rounds and extrapolated linearly. The result is at least
the time of the iteration's busiest link, which may be another link than in few rounds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf
from typing import NamedTuple

from megatron_ext.bounds.feasibility import usable_routes
from megatron_ext.bounds.memory_headroom import with_headroom
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.baselines import BASELINES
from megatron_ext.planner.blocks import Blocks, Divide, cut_by_layer
from megatron_ext.planner.gather_search import grouping_of
from megatron_ext.planner.link_split import splitter
from megatron_ext.planner.passes.cut_groups import by_parameter, cut_groups
from megatron_ext.planner.passes.offload_groups import Offloader, Rule
from megatron_ext.planner.passes.place_gathers import place_gathers
from megatron_ext.planner.place_choices import choices_of, route_sets
from megatron_ext.planner.within_memory import reliefs_of, rules, with_whole_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

Make = Callable[[Workload, Timing], Schedule]
Made = tuple[str, tuple[Schedule, ...]]
"""A plan's name, and a schedule for every part of :class:`FewRounds`."""

RELIEVED = 2
"""Rules of relieving memory that are simulated: those whose transfers take the least time, of each kind of order."""
ROOM_TRIED = 3
"""Sizes of the room for whole parameters that are tried, the smallest ones, until one works."""
PLACED = 2
"""The number of quick plans, the fastest ones, for which the resting place of optimizer states is decided."""
LAYERS_AHEAD = 8
"""How many layers ahead a placement pass prefetches at zero stage 3."""


class Times(NamedTuple):
    """Times of one iteration in microseconds. ``busy_us``: by link, the time of the busiest rank. ``exposed_us``: the
    time for which compute waits for groups, on the rank that waits longest."""

    iteration_time_us: float
    busy_us: dict[str, float]
    exposed_us: float


class TimedPlan(NamedTuple):
    """A plan: a schedule for every part of :class:`FewRounds`, and its times."""

    schedules: tuple[Schedule, ...]
    times: Times


class FewRounds:
    """A workload with the fewest micro-batches from which its iteration time can be computed; with all if ``every``.

    Attributes:
        parts: (workload, weight); the iteration time is the weighted sum of the iteration times of these workloads.
        steps: steps of one simulation, over all parts and pipeline ranks.
    """

    def __init__(self, workload: Workload, *, every: bool = False):
        parallel = workload.parallel
        number, group = parallel.num_microbatches, parallel.microbatch_group_size
        few, more = max(2 * group, 2), max(3 * group, 4)
        self.parts = [(workload, 1.0)]
        if number > more + group and not number % group and not every:
            beyond = (number - few) / (more - few)
            numbers = ((few, 1 - beyond), (more, beyond))
            self.parts = [(workload.with_microbatches(count), weight) for count, weight in numbers]
        self.steps = sum(2 * parallel.pp * parallel.vp * part.parallel.num_microbatches for part, _ in self.parts)

    def timings(self, table: CostTable) -> list[Timing]:
        return [Timing(part, table) for part, _ in self.parts]

    def times(self, timings: Sequence[Timing], schedules: Sequence[Schedule]) -> Times:
        """Simulated times of a plan, given one schedule for each part."""
        results = [simulate(part, timing, made) for (part, _), timing, made in zip(self.parts, timings, schedules)]
        total = lambda values: sum((weight * value for (_, weight), value in zip(self.parts, values)), 0.0)
        links = sorted({link for result in results for link in result.busy_us})
        busy_us = {link: total(result.busy_us.get(link, 0.0) for result in results) for link in links}
        us = max(total(result.iteration_time_us for result in results), *busy_us.values())
        return Times(us, busy_us, total(max(result.exposed_us, default=0.0) for result in results))


def fastest(rounds: FewRounds, timings: Sequence[Timing], made: Iterable[Made]) -> list[TimedPlan]:
    """The :data:`PLACED` fastest plans of those that can be simulated."""
    found = []
    for _, schedules in made:
        with suppress(InputError):  # the table lacks the route, or a size was not measured
            found.append(TimedPlan(schedules, rounds.times(timings, schedules)))
    return sorted(found, key=lambda plan: plan.times.iteration_time_us)[:PLACED]


def quick_schedules(rounds: FewRounds, timings: Sequence[Timing], *, closely: bool = False) -> Iterator[Made]:
    """Schedules by the rules that are most often the best, as far as they fit. The first one uses all-gathers alone (at
    zero stages 1 and 2: stock Megatron's with ``--overlap-param-gather``). If ``limits.device_bytes`` leaves no room
    for these, and at zero stage 3 whenever that limit is set, :func:`relieved_schedules` are added.

    Raises:
        InputError: no schedule fits.
    """
    zero_stage, limits = rounds.parts[0][0].zero_stage, rounds.parts[0][0].limits
    relieved = relieved_schedules(rounds, timings, closely=closely)
    try:
        parts = [with_headroom(part) for part, _ in rounds.parts]
    except InputError:
        first = None if zero_stage == 1 else next(relieved, None)
        if first is None:
            raise
        yield first
    else:
        for name, make in _rules(zero_stage):
            with suppress(InputError):  # does not fit these limits, or the table lacks the route
                yield name, tuple(map(make, parts, timings))
        if zero_stage < 3 or limits.device_bytes is None:
            return
    yield from relieved


def _rules(zero_stage: int) -> list[tuple[str, Make]]:
    names, near = ("all-gpu", "urgency"), []
    if zero_stage == 3:
        names, near = names[::-1], [("hybrid-near", partial(_placed, layers_ahead=LAYERS_AHEAD))]
    return [*((name, BASELINES[name][1]) for name in names), *near, ("hybrid-inf", partial(_placed, layers_ahead=inf))]


def _placed(workload: Workload, timing: Timing, layers_ahead: float) -> Schedule:
    """Gathers placed layer by layer, over all routes. Below zero stage 3 every layer is divided between the links."""
    routes = usable_routes(workload, timing)
    if len(routes) < 2:
        raise InputError("has no second route", field="routes")
    blocks = _blocks(workload, timing, splitter(timing, routes) if workload.zero_stage < 3 else None)
    return _by_layer(workload, timing, blocks, routes, layers_ahead)


def _blocks(workload: Workload, timing: Timing, divide: Divide | None = None) -> Blocks:
    return cut_groups(workload, timing, [cut_by_layer(chunk) for chunk in workload.chunks], divide)


def _by_layer(
    workload: Workload, timing: Timing, blocks: Blocks, routes: tuple[Route, ...], layers_ahead: float = LAYERS_AHEAD
) -> Schedule:
    layers = [us for row in timing.layers for times in row for us in times.forward]
    choices = choices_of(workload, blocks, layers_ahead * sum(layers) / len(layers), routes)
    made = grouping_of(workload, blocks, choices)
    if made is None:
        raise InputError("a layer does not fit", field="limits.whole_parameter_bytes")
    plan = place_gathers(workload, timing, *made)
    return assemble(workload, blocks.groups, plan.placed, plan.freed, planner="quick")


def relieved_schedules(rounds: FewRounds, timings: Sequence[Timing], *, closely: bool = False) -> Iterator[Made]:
    """Plans by layer that keep ``limits.device_bytes`` at zero stages 2 and 3, with gradients and shards elsewhere as
    far as memory requires it. They use the rules of :mod:`megatron_ext.planner.within_memory` that occupy links for the
    shortest time.

    Args:
        closely: also try large parameters as groups of their own, and several sets of routes.
    """
    work, timing = rounds.parts[-1][0], timings[-1]
    routes, reliefs = reliefs_of(work, timing, usable_routes(work, timing))
    tried = list(rules(work, reliefs))
    ways = [(None, [routes]), (by_parameter, route_sets(routes))] if closely else [(None, [routes])]
    for divide, sets in ways:
        found: dict[tuple[Group, ...], tuple[float, int, Rule]] = {}
        blocks = _blocks(work, timing, divide)
        for size in sorted({rule.whole_bytes or 0 for rule in tried})[:ROOM_TRIED][::-1]:
            for rule in (rule for rule in tried if (rule.whole_bytes or 0) == size):
                offloader = Offloader(work, rule, timing)
                placed = offloader(blocks.groups)  # the room that is left goes to whole parameters as well
                if placed is not None and placed not in found:
                    found[placed] = offloader.cost_us(blocks.groups, placed), len(found), offloader.filled(placed)
            if found:
                break
        best = sorted(found.items(), key=lambda item: item[1][:2])[:RELIEVED]
        for (groups, (_, number, rule)), chosen in product(best, sets):
            with suppress(InputError):
                made = [
                    _by_layer(with_whole_bytes(p, rule), t, _blocks(p, t, divide)._replace(groups=groups), chosen)
                    for (p, _), t in zip(rounds.parts, timings)
                ]
                yield f"relieved-{number}", tuple(made)
