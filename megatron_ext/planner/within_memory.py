"""The fastest plan that keeps ``limits.device_bytes`` at zero stages 2 and 3. Gradients, shards and routes are decided
together.

A rule reserves some bytes for whole parameters and gives an order of reliefs (``passes/offload_groups.py``). Placement
passes estimate every rule; the best few rules are searched.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import inf

from msgspec.structs import replace

from megatron_ext.bounds.feasibility import largest_layers
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.effort import SMALL_STEPS, judged_us, last_found, marked, number_of_steps
from megatron_ext.planner.gather_search import GatherSearch, GridPoint, search
from megatron_ext.planner.passes.offload_groups import Offloader, Relief, Rule
from megatron_ext.planner.problem import Problem
from megatron_ext.planner.reroute import rerouted
from megatron_ext.planner.states_on_drive import with_states_on_drive
from megatron_ext.planner.stock import groups_of
from megatron_ext.schedule.group_facts import can_rest_on_host
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import keeps_device_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.route import ALL_GATHER, ROUTES, SHARD_GATHER, Route, kind_of
from megatron_ext.workload.workload import Workload, group_bytes

ORDERS: tuple[tuple[Relief, ...], ...] = (
    ("sharded", "host", "shards", "alone"),
    ("sharded", "alone", "host", "shards"),
    ("shards", "sharded", "alone", "host"),
    ("sharded", "shards", "alone", "host"),
    ("host", "alone", "shards"),
)

SEARCHED = 2
"""Number of rules that are searched, the best by estimate. More rules are searched only if none of these gives a
schedule."""

FEW_STEPS = 4096
"""With more steps than this, an estimate takes long and a search takes longer. Then fewer ways to cut are estimated,
and a rule that is :data:`MUCH_SLOWER` than the best by estimate is not searched."""

MUCH_SLOWER = 0.02

TRIES = 40
"""How often it is tried to relieve less memory. In large cases this takes a small part of a search."""


def plan_within_memory(problem: Problem, *, only_gathers=False, most_us: Callable[[], float] | None = None) -> Schedule:
    """The fastest schedule found within ``limits.device_bytes``.

    Args:
        problem: with routes; shards are gathered from the host as well if they may rest there.
        only_gathers: use all-gathers alone, with shards that stay on the device.
        most_us: returns an estimate above which rules are not searched. Called if any rule works. Without it, if no
            rule works, return one of the plans that hold the fewest bytes.

    Raises:
        InputError: nothing fits. The message has what is missing and the settings that would help.
    """
    reliefs = frozenset[Relief](("sharded", "host", "alone"))
    if not only_gathers:
        routes, reliefs = reliefs_of(*problem[:3])
        problem = problem._replace(routes=routes)
    estimated = _estimated(problem, reliefs)
    found: list[tuple[float, Schedule, Rule]] = []
    many, below_us = number_of_steps(problem.workload) > FEW_STEPS, most_us() if estimated and most_us else inf
    for us, rule in estimated:
        if len(found) == SEARCHED or us > below_us or (found and many and us > estimated[0][0] * (1 + MUCH_SLOWER)):
            break
        with suppress(InputError):
            found.append((*_searched(problem, rule), rule))
    if found:
        return _relieved_less(problem, *min(found, key=lambda item: item[0]))
    if most_us:
        raise InputError("no rule keeps them", field="limits")
    from megatron_ext.planner.least_memory import least_plan  # ortools takes a while to import

    return least_plan(problem, reliefs)


def gathers_within_memory(problem: Problem) -> Schedule:
    """The same by all-gathers alone. The last result is kept. Raises InputError if the table has no all-gathers."""
    workload, timing = problem[:2]
    alone = problem._replace(routes=(ALL_GATHER,) if timing.offers(ALL_GATHER) else ())
    return last_found("gathers_within_memory", workload, timing, partial(plan_within_memory, alone, only_gathers=True))


def _searched(problem: Problem, rule: Rule) -> tuple[float, Schedule]:
    workload, offloader = problem.workload, Offloader(problem.workload, rule, problem.timing)
    limited = problem._replace(workload=with_whole_bytes(workload, rule))
    schedule, us = search(limited, offload=offloader, effort=1 / SEARCHED)
    check_schedule_fits(schedule, workload)
    return marked(us, schedule), schedule


def _relieved_less(problem: Problem, mark: float, schedule: Schedule, rule: Rule) -> Schedule:
    """The same gathers with fewer gradients and shards elsewhere, if that is faster; otherwise the schedule. It may use
    fewer bytes for whole parameters than its rule leaves. If the host steps, a later pass uses such bytes."""
    workload, timing = problem.workload, problem.timing
    if workload.optimizer.on_host:
        return schedule
    tries = iter(range(TRIES))

    def fits(groups: tuple[Group, ...]) -> bool:
        return next(tries, TRIES) < TRIES and keeps_device_bytes(replace(schedule, groups=groups), workload)

    groups = Offloader(workload, rule, timing).given_back(schedule.groups, fits)
    gathers = [SHARD_GATHER if group.shard_rests else ALL_GATHER for group in groups]
    route_of = lambda action: gathers[action.group] if kind_of(action.route).gathers else action.route
    made = rerouted(replace(schedule, groups=groups), route_of)
    with suppress(InputError):
        check_schedule_fits(made, workload)
        if judged_us(workload, timing, made) * marked(1.0, schedule) < mark:
            return made
    return schedule


def check_schedule_fits(schedule: Schedule, workload: Workload) -> None:
    """Raises InputError if the schedule exceeds the limits of device memory, or of host copies next to shards."""
    match(validate(with_states_on_drive(schedule, workload)), workload)


def _estimated(problem: Problem, reliefs: frozenset[Relief]) -> list[tuple[float, Rule]]:
    """Rules that fit, the fastest by estimate first. Of rules that place a layer's groups in the same way only one is
    kept: the rule that gives all remaining bytes to whole parameters or, if that does not work, the rule itself."""
    workload, seen, found = problem.workload, {}, []
    layers, _ = groups_of(workload, layer_buckets)

    def works(rule: Rule) -> bool:
        offloader = Offloader(workload, rule, problem.timing)
        placed = offloader(layers)
        if placed is None:
            return False
        key = rule.whole_bytes, placed
        if key in seen:
            return seen[key]
        filled = offloader.filled(placed)
        seen[key] = filled != rule and works(filled)
        if not seen[key]:
            us = _estimate(GatherSearch(problem._replace(workload=with_whole_bytes(workload, rule)), offloader))
            seen[key] = us < inf
            if us < inf:
                found.append((us, len(found), rule))
        return seen[key]

    for rule in rules(workload, reliefs):
        works(rule)
    return [(us, rule) for us, _, rule in sorted(found, key=lambda item: item[:2])]


def _estimate(state: GatherSearch) -> float:
    """The best estimate of a few ways to cut. If a simulation is quick, its result instead of the estimate."""
    cuts = list(range(len(state.cuts)))
    if state.steps > FEW_STEPS:
        cuts = cuts[-3:]
    least_us, best = inf, GridPoint(cuts[0], 0, state.middle, 0)
    for cut in sorted(cuts, key=lambda cut: -sum(map(len, state.cuts[cut]))):  # the most blocks are usually the best
        point = best._replace(cut=cut)
        least_us, best = min((least_us, best), (state.estimate(point), point))
    if state.steps > SMALL_STEPS:
        return least_us
    if least_us < inf and (made := state.made(best)) is not None:
        state.time_of(made)
    return state.best_mark


def reliefs_of(
    workload: Workload, timing: Timing, routes: tuple[Route, ...]
) -> tuple[tuple[Route, ...], frozenset[Relief]]:
    """The routes, with the route for shards in host memory if shards may rest there; and the reliefs that are
    possible."""
    reliefs: set[Relief] = {"sharded", "host", "alone"}
    hosted = workload.limits.pinned_host_bytes != 0 and can_rest_on_host(workload)
    possible = tuple(sorted({*routes, SHARD_GATHER}, key=ROUTES.index)) if timing.offers(SHARD_GATHER) else routes
    from_host = (kind.shard_from_host or kind.reads_host_copy for kind in map(kind_of, possible))
    if workload.zero_stage == 3 and hosted and any(from_host):
        reliefs.add("shards")
        routes = possible
    return routes, frozenset(reliefs)


def rules(workload: Workload, reliefs: frozenset[Relief]) -> Iterator[Rule]:
    """Rules worth trying, those that leave most bytes for whole parameters first."""
    orders: dict[tuple[Relief, ...], None] = {tuple(one for one in order if one in reliefs): None for order in ORDERS}
    parallel = workload.parallel
    visits = {1} | ({parallel.microbatch_group_size} if parallel.order == "interleaved" else set())
    for whole_bytes in _whole_bytes(workload):
        for every in sorted(visit for visit in visits if visit <= parallel.num_microbatches):
            for order in orders:
                yield Rule(whole_bytes, order, every)


def _whole_bytes(workload: Workload) -> list[int | None]:
    if workload.zero_stage < 3:
        return [None]
    parallel = workload.parallel
    everything = max(
        sum(group_bytes([p], parallel) for chunk in workload.chunks_of_rank(rank) for p in chunk.parameters)
        for rank in range(parallel.pp)
    )
    least = max(largest_layers(workload))
    most = min(everything, workload.limits.whole_parameter_bytes or everything)
    sizes: set[int] = {most, most // 2, most // 4, 3 * least, 2 * least, least}
    return [*sorted((size for size in sizes if least <= size <= most), reverse=True)]


def with_whole_bytes(workload: Workload, rule: Rule) -> Workload:
    """The workload with the bytes that the rule leaves for whole parameters."""
    return workload if rule.whole_bytes is None else workload.with_limits(whole_parameter_bytes=rule.whole_bytes)
