"""Costs in, schedule out: one function for every policy."""

import contextlib

import msgspec

from megatron_ext.bounds.feasibility import check_fits
from megatron_ext.bounds.host_room import with_host_room
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.bounds.memory_headroom import with_headroom, with_most_headroom
from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.baselines import BASELINES, best_of_gathers
from megatron_ext.planner.device_states import bytes_to_reserve, may_rest_on_device
from megatron_ext.planner.host_step_choice import is_small, with_states_placed
from megatron_ext.planner.local_search import improve
from megatron_ext.planner.random_plan import random_schedule
from megatron_ext.planner.search import search
from megatron_ext.planner.search_state import is_tiny
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.planner.within_memory import plan_within_memory
from megatron_ext.schedule.host_shards import FROM_HOST, by_cpu_shard, can_rest_on_host, with_host_shards
from megatron_ext.schedule.match import check_device_bytes, match
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.state_placement import with_states_on_drive
from megatron_ext.schedule.user_defined_schedule import MeasuredOn, Metadata, PlanOptions, Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import run, with_prediction
from megatron_ext.simulator.timing import Timing, require
from megatron_ext.workload.nodes import check_spread
from megatron_ext.workload.route import ROUTES, Route
from megatron_ext.workload.workload import Workload

PASSES = 2
"""Of changing decisions one by one and solving small groupings, in little memory; the second if solving helped."""

PROVEN = 1e-4
"""Largest gap to a bound that counts as none: CP-SAT's units of time."""

POLICIES = ("hybrid", "exact", "random:SEED", *BASELINES)


def plan(
    workload: Workload,
    table: CostTable,
    *,
    policy: str = "hybrid",
    cost_table_sha256: str | None = None,
    extrapolate: bool = False,
) -> Schedule:
    """A valid schedule for ``workload`` on the machines of ``table``, with its prediction.

    Args:
        policy: one of :data:`POLICIES`.
        cost_table_sha256: stored in the schedule's metadata.
        extrapolate: read cost curves outside their measured range.

    Raises:
        InputError: the workload cannot fit, the limits contradict each other, the policy is
            unknown, or the table lacks a figure.
    """
    check_policy(policy)
    workload = with_activations(workload, table)
    timing = Timing(workload, table, extrapolate=extrapolate)
    by_memory = keeps_device_bytes(workload) and policy in ("hybrid", "gathers-only")
    if by_memory:
        routes, from_host = usable_routes(workload, timing), False
    else:
        workload, routes, from_host = _headroom_and_routes(workload, timing)
    if from_host and policy != "hybrid":  # these know no cpu_shard
        routes = _of_host(usable_routes(workload, timing))
    check_fits(workload)
    _check_routes(workload, timing, routes)
    bound_us = lower_bound(with_most_headroom(workload), timing)
    baselines: dict[str, float] = {}
    if by_memory:
        schedule, baselines = _within_memory(workload, timing, routes, bound_us, policy)
    elif policy == "gathers-only" and (best := best_of_gathers(workload, timing)):
        schedule = best[1]
    elif policy in BASELINES:
        needs, make = BASELINES[policy]
        for route in sorted(needs):
            require(timing, route)
        schedule = make(workload, timing)
    elif policy.startswith("random:"):
        schedule = random_schedule(workload, routes, _seed(policy))
    elif policy == "exact":
        schedule, baselines = _exact(workload, timing, routes, bound_us)
    elif policy == "hybrid" and from_host:
        schedule = _from_host(workload, timing, routes, bound_us)
    else:
        schedule, baselines = _hybrid(workload, timing, routes, bound_us)
    if policy in BASELINES:
        _refuse_what_does_not_fit(schedule, policy)
    if workload.limits.device_bytes is not None and not by_memory:
        schedule = _within_device_bytes(with_host_shards(schedule, workload), workload)
    schedule = _with_states_placed(schedule, workload, timing, policy, routes, bound_us)
    _check_own_work(schedule, workload)
    result = run(workload, timing, schedule, bound_us=bound_us)
    result = result._replace(memory=tuple(memory_bill(schedule, workload)))
    metadata = _metadata(schedule, table, policy, cost_table_sha256)
    return with_prediction(msgspec.structs.replace(schedule, metadata=metadata), result, baselines)


def _with_states_placed(
    schedule: Schedule, workload: Workload, timing: Timing, policy: str, routes: tuple[Route, ...], bound_us: float
) -> Schedule:
    """Where optimizer states rest, and when the host steps them; ``hybrid``, and what it is compared with, choose by
    simulation."""
    if policy == "hybrid":
        placed = with_states_placed(schedule, workload, timing)
        return _with_room_for_states(placed, workload, timing, routes, bound_us)
    if policy == "gathers-only" and workload.optimizer.on_host:
        return with_states_placed(schedule, workload, timing)
    return with_states_on_drive(schedule, workload)


def _with_room_for_states(
    schedule: Schedule, workload: Workload, timing: Timing, routes: tuple[Route, ...], bound_us: float
) -> Schedule:
    """At zero stage 3 whole parameters usually take all the room that the limit leaves: the faster of the schedule and,
    in small cases, of plans that leave room for optimizer states on the device."""
    if workload.zero_stage < 3 or not may_rest_on_device(workload, timing) or not is_small(workload):
        return schedule
    us, limits = run(workload, timing, schedule).iteration_time_us, workload.limits
    for size in bytes_to_reserve(schedule, workload, timing):
        less = msgspec.structs.replace(limits, device_bytes=(limits.device_bytes or 0) - size)
        with contextlib.suppress(InputError):  # so much room cannot be left
            narrow = msgspec.structs.replace(workload, limits=less)
            tried, _ = _within_memory(narrow, timing, routes, bound_us, "hybrid", again=True)
            whole = msgspec.structs.replace(tried.limits, device_bytes=limits.device_bytes)
            tried = with_states_placed(msgspec.structs.replace(tried, limits=whole), workload, timing)
            tried_us = run(workload, timing, tried).iteration_time_us
            us, schedule = min((us, schedule), (tried_us, tried), key=lambda found: found[0])
    return schedule


def _metadata(schedule: Schedule, table: CostTable, policy: str, digest: str | None) -> Metadata:
    return msgspec.structs.replace(
        schedule.metadata,
        planner=policy.partition(":")[0],
        cost_table_sha256=digest,
        options=_options_of_run(schedule, table),
    )


def keeps_device_bytes(workload: Workload) -> bool:
    """Whether gradients, and at zero stage 3 shards, can go elsewhere to keep ``limits.device_bytes``."""
    return workload.limits.device_bytes is not None and workload.zero_stage > 1


def _within_memory(
    workload: Workload, timing: Timing, routes: tuple[Route, ...], bound_us: float, policy: str, *, again: bool = False
) -> tuple[Schedule, dict[str, float]]:
    """The faster of the plans by all routes and by all-gathers alone, and the time of the latter. ``again``: the latter
    is known with more room."""
    found: dict[str, tuple[float, Schedule]] = {}
    reasons: dict[str, InputError] = {}
    ways: dict[str, tuple[Route, ...]] = {}
    if not again:
        ways["gathers-only"] = tuple(route for route in routes if route == "gpu")
    if policy == "hybrid":
        ways[policy] = routes
    for name, chosen in ways.items():
        if not chosen:
            continue
        try:
            schedule = plan_within_memory(workload, timing, chosen, bound_us, only_gathers=name != "hybrid")
            found[name] = run(workload, timing, schedule).iteration_time_us, schedule
        except InputError as error:
            reasons[name] = error
    if not found:
        raise list(reasons.values())[-1]
    baselines = {name: us for name, (us, _) in found.items() if name == "gathers-only"}
    best = _best(found)
    schedule = found[best][1]
    return schedule if best == policy else _named(schedule, best, reasons.get("hybrid")), baselines


def _best(found: dict[str, tuple[float, Schedule]]) -> str:
    """The name of the fastest; ``hybrid`` only where it is faster than every baseline."""
    return min(found, key=lambda name: (found[name][0] * (1 + 1e-9 if name == "hybrid" else 1), name == "hybrid"))


def _named(schedule: Schedule, rule: str, failed: InputError | None) -> Schedule:
    """The schedule of a baseline, with its name and why the search gave nothing, for :func:`search_note`."""
    options = PlanOptions(rule=rule, search_failed=None if failed is None else str(failed))
    metadata = msgspec.structs.replace(schedule.metadata, options=options)
    return msgspec.structs.replace(schedule, metadata=metadata)


def check_policy(policy: str) -> None:
    """Raises InputError where there is no such policy."""
    if policy.startswith("random:"):
        _seed(policy)
    elif policy not in POLICIES or policy == "random:SEED":
        raise InputError(f"unknown policy; known: {', '.join(POLICIES)}", field="policy", value=policy)


def _exact(workload: Workload, timing: Timing, routes, bound_us: float) -> tuple[Schedule, dict[str, float]]:
    """The exact solver's schedule, and the baselines' times."""
    from megatron_ext.planner.exact import exact_schedule  # ortools takes a while to import

    known, baselines = _hybrid(workload, timing, routes, bound_us)
    known_us = run(workload, timing, known, bound_us=0.0).iteration_time_us
    return exact_schedule(workload, timing, routes, known, known_us, bound_us), baselines


def _headroom_and_routes(workload: Workload, timing: Timing) -> tuple[Workload, tuple[Route, ...], bool]:
    """The workload with what ``limits.device_bytes`` leaves for whole parameters and ``limits.host_bytes`` for host
    copies, the routes to plan with, and whether all shards rest in host memory, because on the device they leave too
    little.

    Raises:
        InputError: it cannot fit either way.
    """
    workload = with_host_room(workload)
    routes = usable_routes(workload, timing)
    try:
        return with_headroom(workload), routes, False
    except InputError:
        possible = any(route in FROM_HOST for route in routes) or timing.offers_cpu_shard
        if workload.zero_stage < 3 or not possible or not can_rest_on_host(workload):
            raise
        return with_headroom(workload, "host"), routes, True


def _from_host(workload: Workload, timing: Timing, routes: tuple[Route, ...], bound_us: float) -> Schedule:
    """The faster of two plans with all shards in host memory: by host copies alone, and with all-gathers of shards that
    come from there, in the groups in which a search chooses all-gathers.

    Raises:
        InputError: neither keeps the limits.
    """
    found: list[tuple[float, Schedule]] = []
    reasons: list[InputError] = []
    alone = _of_host(routes)
    for chosen in {alone, routes if timing.offers_cpu_shard else alone} - {()}:
        try:
            searched, _ = _hybrid(workload, timing, chosen, bound_us)
            schedule = validate(with_host_shards(by_cpu_shard(searched), workload))
            found.append((run(workload, timing, schedule, bound_us=0.0).iteration_time_us, schedule))
        except InputError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return min(found, key=lambda item: item[0])[1]


def _within_device_bytes(schedule: Schedule, workload: Workload) -> Schedule:
    """The schedule, or stock Megatron's own where at zero stage 1 the padding of the schedule's groups is too much.

    Raises:
        InputError: neither keeps ``limits.device_bytes``.
    """
    limit = workload.limits.device_bytes
    assert limit is not None
    try:
        check_device_bytes(schedule, workload, limit)
    except InputError as error:
        if workload.zero_stage == 3:
            raise
        options = PlanOptions(rule="all-gpu", search_failed=str(error))
        schedule = stock_schedule(workload)
        schedule = msgspec.structs.replace(
            schedule, metadata=msgspec.structs.replace(schedule.metadata, options=options)
        )
        check_device_bytes(schedule, workload, limit)
    return schedule


def _check_routes(workload: Workload, timing: Timing, routes: tuple[str, ...]) -> None:
    """Raises InputError where something must be gathered and no route is left for it."""
    if routes or not any(chunk.parameters for chunk in workload.chunks):
        return
    shut = [route for route in ROUTES if timing.offers(route)]
    if shut and not _spreads_evenly(workload):
        raise InputError(
            f"nodes hold different numbers of replicas, which {' or '.join(shut)} cannot serve: nothing can be "
            "gathered",
            field="parallel.gpus_per_node",
            value=workload.parallel.gpus_per_node,
        )
    why = (
        f"the limits (pinned_host_bytes, nvme_slots) leave no room for {' or '.join(shut)}"
        if shut
        else "no route has points"
    )
    raise InputError(f"{why}: nothing can be gathered", field="limits" if shut else "routes")


def search_note(schedule: Schedule) -> str | None:
    """A note for the reader where the plan is a baseline, because the search found nothing better, or of policy
    ``exact`` what is proven; None otherwise."""
    options = schedule.metadata.options
    if options.proven_gap is not None:
        if options.proven_gap <= PROVEN:
            return "Proven: none of the groupings that were solved has a faster schedule."
        return f"Not proven: a schedule that is up to {options.proven_gap:.2%} shorter is not ruled out."
    if options.search_failed is not None:
        return f"The search found no schedule ({options.search_failed}). The plan is the baseline {options.rule}."
    if options.rule is not None:
        return f"The search found nothing faster than the baseline {options.rule}, which is the plan."
    return None


def _options_of_run(schedule: Schedule, table: CostTable) -> PlanOptions:
    """The schedule's options with what a run reads of the table: where it was measured, and how the drive is read
    best."""
    options, metadata, nvme = schedule.metadata.options, table.metadata, table.routes.nvme
    if not metadata.synthetic and (metadata.hardware or metadata.software):
        measured_on = MeasuredOn(hardware=metadata.hardware, software=metadata.software)
        options = msgspec.structs.replace(options, measured_on=measured_on)
    if nvme is not None and any("nvme" in entry.to for entry in schedule.publish):
        options = msgspec.structs.replace(options, nvme=nvme.reads)
    return options


def _check_own_work(schedule: Schedule, workload: Workload) -> None:
    """Check the finished plan as a run would; a failure is a defect of the planner, not of the input."""
    try:
        match(validate(schedule), workload)
    except InputError as error:
        raise AssertionError(f"the planner made a schedule that would be refused: {error}") from error


def _refuse_what_does_not_fit(schedule: Schedule, policy: str) -> None:
    """Raise InputError where the schedule of a rule that does not count limits or padding does not fit."""
    try:
        validate(schedule)
    except InputError as error:
        raise InputError(f"does not keep the limits: {error}", field="policy", value=policy) from None


def usable_routes(workload: Workload, timing: Timing) -> tuple[Route, ...]:
    """Routes that the table offers, the limits allow, and the nodes can serve."""
    limits = workload.limits
    shut = set() if limits.nvme_slots else {"nvme"}
    if limits.pinned_host_bytes == 0 or not _spreads_evenly(workload):
        shut |= {"cpu", "nvme"}
    shut.add("cpu_shard")  # planned in place of all-gathers, where shards rest in host memory
    return tuple(route for route in ROUTES if timing.offers(route) and route not in shut)


def _spreads_evenly(workload: Workload) -> bool:
    """Whether every node has as many of a group's replicas as another: host copies need it."""
    try:
        check_spread(workload.parallel)
    except InputError:
        return False
    return True


def _of_host(routes: tuple[Route, ...]) -> tuple[Route, ...]:
    return tuple(route for route in routes if route in FROM_HOST)


def _seed(policy: str) -> int:
    text = policy.partition(":")[2]
    if not text.isdecimal() or len(text) > 18:
        raise InputError("expected random:SEED with a whole number", field="policy", value=policy)
    return int(text)


def _hybrid(workload: Workload, timing: Timing, routes, bound_us: float) -> tuple[Schedule, dict[str, float]]:
    """The best of everything that can be planned, by simulation: never worse than a baseline.

    What cannot be simulated (a group larger than any that was measured, host copies that do
    not fit) is no candidate; only if nothing is left does the first reason count. Where no schedule is faster than a
    baseline, the plan is the baseline and its options name it, and why the search gave nothing.
    """
    found: dict[str, tuple[float, Schedule]] = {}
    reasons: dict[str, InputError] = {}

    def consider(name: str, make) -> None:
        try:
            schedule = make()
            if name in BASELINES:
                _refuse_what_does_not_fit(schedule, name)
            schedule = with_states_on_drive(schedule, workload)
            found[name] = run(workload, timing, schedule, bound_us=0.0).iteration_time_us, schedule
        except InputError as error:
            reasons[name] = error

    for name, (needs, make) in BASELINES.items():
        if needs <= set(routes):
            consider(name, lambda make=make: make(workload, timing))
    consider("hybrid", lambda: _searched(workload, timing, routes, bound_us))
    if not found:
        raise next(iter(reasons.values()))
    best = _best(found)
    schedule = found[best][1] if best == "hybrid" else _named(found[best][1], best, reasons.get("hybrid"))
    return schedule, {name: us for name, (us, _) in found.items() if name != "hybrid"}


def _searched(workload: Workload, timing: Timing, routes, bound_us: float) -> Schedule:
    found, found_us = search(workload, timing, routes, bound_us)
    if found_us > bound_us * (1 + 1e-9) and is_tiny(workload):
        from megatron_ext.planner.exact import BETWEEN, SMALL, solve  # ortools takes a while to import

        by_changes = workload.zero_stage == 3 and bool(workload.limits.whole_parameter_bytes) and "nvme" not in routes
        for _ in range(PASSES if by_changes else 1):
            if by_changes:
                found, found_us = improve(workload, timing, routes, found, found_us, bound_us)
            changed_us = found_us
            found, found_us, _ = solve(workload, timing, routes, found, found_us, BETWEEN if by_changes else SMALL)
            if found_us == changed_us:
                break
    return found
