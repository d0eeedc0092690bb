"""Costs in, schedule out: one function for every policy."""

from typing import Any

import msgspec

from megatron_ext.cost.model import CostTable
from megatron_ext.errors import InputError
from megatron_ext.planner.baselines import BASELINES
from megatron_ext.planner.random_plan import random_schedule
from megatron_ext.planner.search import is_tiny, search
from megatron_ext.schedule.match import match
from megatron_ext.schedule.model import Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.bound import lower_bound
from megatron_ext.simulator.fit import check_fits
from megatron_ext.simulator.simulate import run, with_prediction
from megatron_ext.simulator.timing import Timing, require
from megatron_ext.workload.model import Workload
from megatron_ext.workload.nodes import check_spread
from megatron_ext.workload.route import ROUTES

POLICIES = ("hybrid", "exact", "random:SEED", *BASELINES)


def plan(
    workload: Workload,
    table: CostTable,
    *,
    policy: str = "hybrid",
    cost_table_sha256: str | None = None,
    megatron_core: str | None = None,
    extrapolate: bool = False,
) -> Schedule:
    """A valid schedule for ``workload`` on the machines of ``table``, with its prediction.

    Args:
        policy: one of :data:`POLICIES`.
        cost_table_sha256, megatron_core: stored in the schedule's metadata.
        extrapolate: read cost curves outside their measured range.

    Raises:
        InputError: the workload cannot fit, the limits contradict each other, the policy is
            unknown, or the table lacks a figure.
    """
    check_fits(workload)
    timing = Timing(workload, table, extrapolate=extrapolate)
    routes = usable_routes(workload, timing)
    has_parameters = any(chunk.parameters for chunk in workload.chunks)
    if not routes and has_parameters:
        shut = [route for route in ROUTES if timing.offers(route)]
        if shut and not _spreads_evenly(workload):
            raise InputError(f"nodes hold different numbers of replicas, which {' or '.join(shut)} cannot serve: nothing can be gathered", field="parallel.gpus_per_node", value=workload.parallel.gpus_per_node)
        why = f"the limits (pinned_host_bytes, nvme_slots) leave no room for {' or '.join(shut)}" if shut else "no route has points"
        raise InputError(f"{why}: nothing can be gathered", field="limits" if shut else "routes")
    bound_us = lower_bound(workload, timing)
    baselines: dict[str, float] = {}
    if policy in BASELINES:
        needs, make = BASELINES[policy]
        for route in sorted(needs):
            require(timing, route)
        schedule = make(workload, timing)
    elif policy.startswith("random:"):
        schedule = random_schedule(workload, routes, _seed(policy))
    elif policy == "exact":
        from megatron_ext.planner.exact import exact_schedule  # ortools takes a while to import

        known, baselines = _hybrid(workload, timing, routes, bound_us)
        known_us = run(workload, timing, known, bound_us=0.0).step_time_us
        schedule = exact_schedule(workload, timing, routes, known, known_us, bound_us)
    elif policy == "hybrid":
        schedule, baselines = _hybrid(workload, timing, routes, bound_us)
    else:
        raise InputError(f"unknown policy; known: {', '.join(POLICIES)}", field="policy", value=policy)
    if policy in BASELINES:
        _refuse_what_does_not_fit(schedule, policy)
    _check_own_work(schedule, workload)
    result = run(workload, timing, schedule, bound_us=bound_us)
    metadata = msgspec.structs.replace(
        schedule.metadata, planner=policy.partition(":")[0], cost_table_sha256=cost_table_sha256, megatron_core=megatron_core,
        options=schedule.metadata.options | _for_the_run(schedule, table),
    )  # fmt: skip
    return with_prediction(msgspec.structs.replace(schedule, metadata=metadata), result, baselines)


def _for_the_run(schedule: Schedule, table: CostTable) -> dict[str, Any]:
    """What a run reads of the table: the machine that it was measured on, to say where another one
    trains, and how the drive was read best."""
    metadata, options = table.metadata, {}
    if not metadata.synthetic:
        measured_on = {part: getattr(metadata, part) for part in ("hardware", "software") if isinstance(getattr(metadata, part), dict)}
        options |= {"measured_on": measured_on} if measured_on else {}
    drive = table.routes.nvme.settings if table.routes.nvme is not None else {}
    if any("nvme" in entry.to for entry in schedule.publish) and {"block_bytes", "queue_depth"} <= drive.keys():
        options["nvme"] = {name: drive[name] for name in ("block_bytes", "queue_depth")}
    return options


def _check_own_work(schedule: Schedule, workload: Workload) -> None:
    """What a run would refuse is not written: it would be our mistake, not the user's."""
    try:
        match(validate(schedule), workload)
    except InputError as error:
        raise AssertionError(f"the planner made a schedule that would be refused: {error}") from error


def _refuse_what_does_not_fit(schedule: Schedule, policy: str) -> None:
    """A rule knows nothing of limits, or not what its own cut adds in padding. Raises InputError."""
    try:
        validate(schedule)
    except InputError as error:
        raise InputError(f"does not keep the limits: {error}", field="policy", value=policy) from None


def usable_routes(workload: Workload, timing: Timing) -> tuple[str, ...]:
    """Routes that the table offers, the limits leave room for, and the nodes can serve."""
    limits = workload.limits
    shut = set() if limits.nvme_slots else {"nvme"}
    if limits.pinned_host_bytes == 0 or not _spreads_evenly(workload):
        shut |= {"cpu", "nvme"}
    return tuple(route for route in ROUTES if timing.offers(route) and route not in shut)


def _spreads_evenly(workload: Workload) -> bool:
    """Whether every node has as many of a group's replicas as another: host copies need it."""
    try:
        check_spread(workload.parallel)
    except InputError:
        return False
    return True


def _seed(policy: str) -> int:
    text = policy.partition(":")[2]
    if not text.isdecimal() or len(text) > 18:
        raise InputError("expected random:SEED with a whole number", field="policy", value=policy)
    return int(text)


def _hybrid(workload: Workload, timing: Timing, routes, bound_us: float) -> tuple[Schedule, dict[str, float]]:
    """The best of everything that can be planned, by simulation: never worse than a baseline.

    What cannot be simulated (a group larger than any that was measured, host copies that do
    not fit) is no candidate; only if nothing is left does the first reason count.
    """
    schedules, times, reasons = {}, {}, []

    def consider(name: str, make) -> None:
        try:
            schedule = make()
            if name in BASELINES:
                _refuse_what_does_not_fit(schedule, name)
            times[name] = run(workload, timing, schedule, bound_us=0.0).step_time_us
            schedules[name] = schedule
        except InputError as error:
            reasons.append(error)

    for name, (needs, make) in BASELINES.items():
        if needs <= set(routes):
            consider(name, lambda make=make: make(workload, timing))
    consider("hybrid", lambda: _searched(workload, timing, routes, bound_us))
    if not schedules:
        raise reasons[0]
    best = min(schedules, key=lambda name: (times[name], name != "hybrid"))
    return schedules[best], {name: us for name, us in times.items() if name != "hybrid"}


def _searched(workload: Workload, timing: Timing, routes, bound_us: float) -> Schedule:
    found, found_us = search(workload, timing, routes, bound_us)
    if found_us > bound_us * (1 + 1e-9) and is_tiny(workload):
        from megatron_ext.planner.exact import SMALL, solve  # ortools takes a while to import

        found = solve(workload, timing, routes, found, found_us, SMALL)[0]
    return found
