"""Costs in, schedule out: one function for all policies, and the table of policies."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.baselines import BASELINES, best_of_gathers
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.effort import is_small, is_tiny, judged_us, marked, number_of_steps
from megatron_ext.planner.finish import finished, rest_states, those_that_can
from megatron_ext.planner.gather_search import search
from megatron_ext.planner.in_processes import in_processes
from megatron_ext.planner.local_search import improve
from megatron_ext.planner.passes.rest_states import bytes_to_reserve, rest_as_must
from megatron_ext.planner.problem import Problem, problem_of
from megatron_ext.planner.quick_plan import PLACED, FewRounds, quick_schedules
from megatron_ext.planner.random_plan import random_schedule
from megatron_ext.planner.reroute import with_host_shards
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.planner.within_memory import check_schedule_fits, gathers_within_memory, plan_within_memory
from megatron_ext.schedule.match import check_device_bytes, match
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.user_defined_schedule import MeasuredOn, PlanOptions, Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import simulate, with_prediction
from megatron_ext.simulator.timing import require_route
from megatron_ext.workload.route import ALL_GATHER, ON_DRIVE, kind_of
from megatron_ext.workload.workload import Workload

ROUNDS = 2
"""How often decisions are changed one by one and small groupings are solved, if memory is short. The second round runs
only if solving helped."""

PROVEN = 1e-4
"""The largest gap to a bound that counts as no gap. It comes from CP-SAT's units of time."""


class FoundSchedules(NamedTuple):
    """Schedules in which groups are cut and kept and gathers are placed: those that are worth finishing, the fastest
    first. ``baselines_us``: iteration times of other policies by name."""

    schedules: tuple[Schedule, ...]
    baselines_us: dict[str, float] = {}


def plan(workload: Workload, table: CostTable, **how) -> Schedule:
    """A valid schedule for ``workload`` on the machines of ``table``, with its prediction. Arguments: see
    :func:`planned`."""
    return planned(workload, table, **how).schedule


def planned(
    workload: Workload,
    table: CostTable,
    *,
    policy: str = "hybrid",
    cost_table_sha256: str | None = None,
    extrapolate: bool = False,
    compare: bool = True,
) -> Candidate:
    """A plan with its prediction, and with what every pass decided and why.

    Args:
        policy: one of :data:`POLICIES`.
        cost_table_sha256: stored in the schedule's metadata.
        extrapolate: read cost curves outside their measured range.
        compare: if ``limits.device_bytes`` is set at zero stage 2 or 3, also plan with all-gathers alone. That plan is
            a baseline of the prediction, and it is chosen if it is faster. This doubles the planning time.

    Raises:
        InputError: the workload cannot fit, the limits contradict each other, the policy is
            unknown, or the table lacks a figure.
    """
    chosen = check_policy(policy)
    problem = problem_of(workload, table, offloads=chosen.offloads, extrapolate=extrapolate)
    problem = problem._replace(compares=compare)
    found = chosen.find(problem, policy)  # runs the passes cut, offload and place
    workload, given = problem.workload, []
    for each in found.schedules:
        given.append(Candidate(workload, problem.timing, each).decided("cut", _compared(each, found, chosen.fixes)))
    candidate = chosen.finish(problem, those_that_can(given, partial(_within_device_bytes, problem)))
    schedule = candidate.schedule
    _check_own_work(schedule, workload)
    result = simulate(workload, problem.timing, schedule, bound_us=problem.bound_us)
    result = result._replace(memory=tuple(memory_bill(schedule, workload)))
    name, options = policy.partition(":")[0], _options_of_run(schedule, table)
    metadata = replace(schedule.metadata, planner=name, cost_table_sha256=cost_table_sha256, options=options)
    schedule = with_prediction(replace(schedule, metadata=metadata), result, found.baselines_us)
    return candidate._replace(schedule=schedule, us=result.iteration_time_us)


def _compared(schedule: Schedule, found: FoundSchedules, fixed: str) -> str:
    """A text that names the policies that the groups and gathers of a plan were compared with, and their times."""
    times = ", ".join(f"{name} {us / 1e3:.3f}" for name, us in found.baselines_us.items())
    rule = schedule.metadata.options.rule
    said = f"the policy fixes {fixed}"
    said += f", and takes the groups and gathers of {rule}" if rule else ""
    return f"{said}; simulated for comparison (ms): {times}" if times else said


def check_policy(policy: str) -> "Policy":
    """The row of the table of policies. Raises InputError if there is no such policy."""
    if policy.startswith("random:"):
        _seed(policy)
        return POLICIES["random:SEED"]
    if policy not in POLICIES:
        raise InputError(f"unknown policy; known: {', '.join(POLICIES)}", field="policy", value=policy)
    return POLICIES[policy]


def _seed(policy: str) -> int:
    text = policy.partition(":")[2]
    if not text.isdecimal() or len(text) > 18:
        raise InputError("expected random:SEED with a whole number", field="policy", value=policy)
    return int(text)


def _hybrid(problem: Problem, _: str = "hybrid") -> FoundSchedules:
    """The plan that is fastest by simulation, of everything that can be planned. No baseline or quick plan that
    relieves as much memory is faster (``RELIEF_WEIGHT``).

    A plan that cannot be simulated is no candidate, for example if a group is larger than any that was measured, or if
    host copies do not fit. If no plan is left, the reason of the search is reported. If no schedule is faster than a
    baseline, the plan is the baseline. Its options name the baseline, and say why the search found nothing.
    """
    workload, timing, quick = problem.workload, problem.timing, _quick(problem)
    ways: dict[str, Callable[[], Schedule]] = {}
    if not problem.offloads:
        for name, (needs, make) in BASELINES.items():
            if needs <= set(problem.routes):
                ways[name] = lambda name=name, make=make: _that_fits(make(workload, timing), name)
    elif ALL_GATHER in problem.routes and problem.compares:
        ways["gathers-only"] = lambda: _searched(problem, only_gathers=True)
    ways["hybrid"] = lambda: _searched(problem)
    for name, made in quick.items():
        ways.setdefault(name, lambda made=made: made)

    def judged(make: Callable[[], Schedule]) -> tuple[float, Schedule]:
        return judged_us(workload, timing, schedule := make()), schedule

    # The first task runs in this process, where the verdict finds the plan by all-gathers alone.
    made = in_processes([partial(judged, make) for make in ways.values()], _simulated(problem))
    reasons = {name: one for name, one in zip(ways, made) if isinstance(one, InputError)}
    found = {name: one for name, one in zip(ways, made) if not isinstance(one, InputError)}
    if not found:
        raise reasons["hybrid"]

    def order(name: str) -> tuple[float, bool]:
        """By time. Of plans that are as fast but for rounding errors, baselines are first and ``hybrid`` is last."""
        mark = marked(*found[name])
        return mark if name in BASELINES else mark * (1 + 1e-9), name == "hybrid"

    names = sorted(found, key=order)
    chosen, failed = names[:1], str(reasons.get("hybrid", "")) or None
    if workload.optimizer.on_host:  # finer groups may be faster, once states rest and the host steps group by group
        gathers = [name for name in names if name in BASELINES and BASELINES[name][0] == {ALL_GATHER}]
        chosen += [*gathers[:1], *[name for name in names if name in quick][:PLACED]]
    schedules = {name: found[name][1] for name in chosen}
    for name, each in schedules.items():
        options = PlanOptions(rule=name if name in BASELINES else None, search_failed=failed)
        schedules[name] = replace(each, metadata=replace(each.metadata, options=options))
    return FoundSchedules(tuple(schedules.values()), {name: us for name, (us, _) in found.items() if name in BASELINES})


def _simulated(problem: Problem) -> int:
    """About how many steps and gathers the searches within ``limits.device_bytes`` simulate: some hundred schedules,
    with a gather per layer and step. 0 without that limit, where there is one search."""
    layers = max(chunk.num_layers for chunk in problem.workload.chunks)
    return 500 * number_of_steps(problem.workload) * layers * problem.offloads


def _quick(problem: Problem) -> dict[str, Schedule]:
    """Quick plans by name, if something is decided that the search for gathers does not consider: what is offloaded, or
    the host's step."""
    if not (problem.offloads or problem.workload.optimizer.on_host):
        return {}
    found, rounds = {}, FewRounds(problem.workload, every=True)
    with contextlib.suppress(InputError):  # no quick plan fits
        for name, made in quick_schedules(rounds, [problem.timing]):
            with contextlib.suppress(InputError):
                check_schedule_fits(made[0], problem.workload) if problem.offloads else validate(made[0])
                found[name] = made[0]
    return found


def _searched(problem: Problem, only_gathers: bool = False) -> Schedule:
    if problem.offloads:
        return gathers_within_memory(problem) if only_gathers else plan_within_memory(problem)
    workload, found, found_us = problem.workload, *search(problem)
    if found_us > problem.bound_us * (1 + 1e-9) and is_tiny(workload):
        from megatron_ext.planner.exact import BETWEEN, SMALL, solve  # ortools takes a while to import

        by_changes = workload.streamed_bytes and not any(kind_of(route).staged for route in problem.routes)
        for _ in range(ROUNDS if by_changes else 1):
            if by_changes:
                found, found_us = improve(problem, found, found_us)
            changed_us = found_us
            found, found_us, _ = solve(problem, found, found_us, BETWEEN if by_changes else SMALL)
            if found_us == changed_us:
                break
    return found


def _exact(problem: Problem, _: str) -> FoundSchedules:
    """The schedule of the exact solver, and the iteration times of the baselines."""
    from megatron_ext.planner.exact import exact_schedule  # ortools takes a while to import

    found = _hybrid(problem)
    known_us = judged_us(problem.workload, problem.timing, found.schedules[0])
    return found._replace(schedules=(exact_schedule(problem, found.schedules[0], known_us),))


def _gathers_only(problem: Problem, policy: str) -> FoundSchedules:
    if problem.offloads:
        schedule = _searched(problem, only_gathers=True)
        return FoundSchedules((schedule,), {policy: judged_us(problem.workload, problem.timing, schedule)})
    best = best_of_gathers(problem.workload, problem.timing)
    return FoundSchedules((best[1],)) if best else _by_rule(problem, policy)


def _random(problem: Problem, policy: str) -> FoundSchedules:
    return FoundSchedules((random_schedule(problem.workload, problem.routes, _seed(policy)),))


def _by_rule(problem: Problem, policy: str) -> FoundSchedules:
    needs, make = BASELINES[policy]
    for route in sorted(needs):
        require_route(problem.timing, route)
    return FoundSchedules((_that_fits(make(problem.workload, problem.timing), policy),))


def _that_fits(schedule: Schedule, policy: str) -> Schedule:
    """Return ``schedule``. Raises InputError if it does not fit: some rules do not count limits or padding."""
    try:
        return validate(schedule)
    except InputError as error:
        raise InputError(f"does not keep the limits: {error}", field="policy", value=policy) from None


def _within_device_bytes(problem: Problem, given: Candidate) -> Candidate:
    """A candidate that was made without offloading. Shards whose groups never come from the device are put into host
    memory. At zero stage 1 the result is stock Megatron's own schedule if the padding of the candidate's groups is too
    large.

    Raises:
        InputError: neither of them keeps ``limits.device_bytes``.
    """
    workload, limit = problem.workload, problem.workload.limits.device_bytes
    if limit is None or problem.offloads:
        return given
    schedule = with_host_shards(given.schedule, workload)
    try:
        check_device_bytes(schedule, workload, limit)
    except InputError as error:
        if workload.zero_stage == 3:
            raise
        options = PlanOptions(rule="all-gpu", search_failed=str(error))
        schedule = stock_schedule(workload)
        schedule = replace(schedule, metadata=replace(schedule.metadata, options=options))
        check_device_bytes(schedule, workload, limit)
    return given._replace(schedule=schedule)


def _finish_by_simulation(problem: Problem, given: Sequence[Candidate]) -> Candidate:
    """The fastest candidate after all passes. At zero stage 3 whole parameters usually take all the room that the limit
    leaves. Therefore plans that leave room for optimizer states on the device are tried as well, in small cases. They
    must not be slower by more than what the room would gain if it were there in addition."""
    best = min(those_that_can(given, finished), key=Candidate.simulated_us)
    sizes = bytes_to_reserve(best) if is_small(problem.workload) else []
    # A task returns no candidate, because a candidate's costs are not sent between processes.
    made = in_processes([partial(_with_room, problem, best, given[0], size) for size in sizes], _simulated(problem))
    tried = [best._replace(schedule=one[0], us=one[1], why=one[2]) for one in made if isinstance(one, tuple)]
    return min([best, *tried], key=Candidate.simulated_us)


def _with_room(problem: Problem, best: Candidate, first: Candidate, size: int) -> tuple:
    """Schedule, time and reasons of a plan that leaves ``size`` bytes of the device free of gradients, shards and whole
    parameters. ``first``: the found plan before the last passes, ``best``: the best plan after them.

    Raises:
        InputError: no plan leaves this much room.
    """
    workload, limit = problem.workload, problem.workload.limits.device_bytes or 0

    def most_us() -> float:
        more = first._replace(workload=workload.with_limits(device_bytes=limit + size))
        gain_us = best.simulated_us() - finished(more).simulated_us()
        return marked(judged_us(workload, problem.timing, first.schedule), first.schedule) + gain_us

    less = problem._replace(workload=workload.with_limits(device_bytes=limit - size))
    made = plan_within_memory(less, most_us=most_us)
    made = replace(made, limits=replace(made.limits, device_bytes=limit))
    said = f"{size} bytes of the device are left free of gradients, shards and whole parameters"
    tried = finished(first._replace(schedule=made)).decided(rest_states.NAME, said)
    return tried.schedule, tried.us, tried.why


def _finish_alike(problem: Problem, given: Sequence[Candidate]) -> Candidate:
    """Finish as ``hybrid`` does if the host steps, so that a plan's gain over this one comes from its gathers alone."""
    return (finished if problem.workload.optimizer.on_host else rest_as_must)(given[0])


class Policy(NamedTuple):
    """Attributes:
    fixes: what the policy does not choose.
    find: runs the passes cut, offload and place.
    finish: runs the passes step slots, rest states and host step.
    offloads: whether gradients and shards may go elsewhere to keep ``limits.device_bytes``.
    """

    fixes: str
    find: Callable[[Problem, str], FoundSchedules]
    finish: Callable[[Problem, Sequence[Candidate]], Candidate] = lambda _, given: rest_as_must(given[0])
    offloads: bool = False


POLICIES = {
    "hybrid": Policy("nothing", _hybrid, _finish_by_simulation, offloads=True),
    "exact": Policy("the host's step", _exact),
    "random:SEED": Policy("everything, drawn by chance", _random),
} | {name: Policy("groups, routes and steps, by a rule", _by_rule) for name in BASELINES}
POLICIES["gathers-only"] = Policy("the route: all-gathers", _gathers_only, _finish_alike, offloads=True)


def _check_own_work(schedule: Schedule, workload: Workload) -> None:
    """Check the finished plan as a run does. A failure is a defect of the planner, not of the input."""
    try:
        match(validate(schedule), workload)
    except InputError as error:
        raise AssertionError(f"the planner made a schedule that would be refused: {error}") from error


def search_note(schedule: Schedule) -> str | None:
    """A note for the reader if the plan is a baseline because the search found nothing better, or, for policy
    ``exact``, what is proven. None otherwise."""
    options = schedule.metadata.options
    if options.proven_gap is not None:
        if options.proven_gap <= PROVEN:
            return "Proven: none of the groupings that were solved has a faster schedule."
        return f"Not proven: a schedule that is up to {1 - 1 / (1 + options.proven_gap):.2%} shorter is not ruled out."
    if options.search_failed is not None:
        by = f"the baseline {options.rule}" if options.rule else "one of the quick plans"
        return f"The search found no schedule ({options.search_failed}). The plan is {by}."
    if options.rule is not None:
        return f"The search found nothing faster than the baseline {options.rule}, which is the plan."
    return None


def _options_of_run(schedule: Schedule, table: CostTable) -> PlanOptions:
    """The schedule's options with the figures of the table that a run reads: where the table was measured, and how the
    drive is read best."""
    options, metadata, nvme = schedule.metadata.options, table.metadata, table.routes.nvme
    if not metadata.synthetic and (metadata.hardware or metadata.software):
        measured_on = MeasuredOn(hardware=metadata.hardware, software=metadata.software)
        options = replace(options, measured_on=measured_on)
    if nvme is not None and any(ON_DRIVE in entry.to for entry in schedule.publish):
        options = replace(options, nvme=nvme.reads)
    return options
