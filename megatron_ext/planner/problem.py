"""The input of a planner: a workload with the room that its limits leave, its costs, and the routes that may be
used."""

from typing import NamedTuple

from megatron_ext.bounds.feasibility import check_fits, spreads_evenly, usable_routes
from megatron_ext.bounds.host_room import with_host_room
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.bounds.memory_headroom import with_headroom, with_most_headroom
from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.group_facts import can_rest_on_host
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import ROUTES, SHARD_GATHER, Route, kind_of
from megatron_ext.workload.workload import Workload


class Problem(NamedTuple):
    """Attributes:
    workload: has the bytes that its limits leave for whole parameters and for host copies.
    routes: the routes that may be used.
    bound_us: a time that no schedule can beat.
    offloads: whether gradients, and at zero stage 3 shards, may go elsewhere to keep ``limits.device_bytes``.
    compares: whether plans with all-gathers alone are made as well, if groups are offloaded.
    """

    workload: Workload
    timing: Timing
    routes: tuple[Route, ...]
    bound_us: float = 0.0
    offloads: bool = False
    compares: bool = True


def problem_of(workload: Workload, table: CostTable, *, offloads: bool, extrapolate: bool = False) -> Problem:
    """The problem of planning ``workload`` on the machines of ``table``.

    Args:
        offloads: whether the policy can plan gradients and shards that go elsewhere.

    Raises:
        InputError: the workload cannot fit, the limits contradict each other, or nothing can be gathered.
    """
    workload = with_activations(workload, table)
    timing = Timing(workload, table, extrapolate=extrapolate)
    offloads = offloads and workload.limits.device_bytes is not None and workload.zero_stage > 1
    if offloads:
        routes = usable_routes(workload, timing)
    else:
        workload, routes = _with_headroom(workload, timing)
    check_fits(workload)
    _check_routes(workload, timing, routes)
    return Problem(workload, timing, routes, lower_bound(with_most_headroom(workload), timing), offloads)


def _with_headroom(workload: Workload, timing: Timing) -> tuple[Workload, tuple[Route, ...]]:
    """The workload with the bytes that ``limits.device_bytes`` leaves for whole parameters and ``limits.host_bytes``
    for host copies, and the routes to plan with. If shards on the device leave too little room, all shards rest in host
    memory, and only the routes from the host remain.

    Raises:
        InputError: the workload cannot fit either way.
    """
    workload = with_host_room(workload)
    routes = usable_routes(workload, timing)
    try:
        return with_headroom(workload), routes
    except InputError:
        from_host = tuple(route for route in routes if not kind_of(route).needs_device_shard)
        if workload.zero_stage < 3 or not can_rest_on_host(workload) or not (from_host or timing.offers(SHARD_GATHER)):
            raise
        return with_headroom(workload, "host"), from_host


def _check_routes(workload: Workload, timing: Timing, routes: tuple[str, ...]) -> None:
    """Raises InputError if something must be gathered and no route is left for it."""
    if routes or not any(chunk.parameters for chunk in workload.chunks):
        return
    shut = " or ".join(route for route in ROUTES if timing.offers(route))
    if shut and not spreads_evenly(workload):
        raise InputError(
            f"nodes hold different numbers of replicas, which {shut} cannot serve: nothing can be gathered",
            field="parallel.gpus_per_node",
            value=workload.parallel.gpus_per_node,
        )
    why = f"the limits (pinned_host_bytes, nvme_slots) leave no room for {shut}" if shut else "no route has points"
    raise InputError(f"{why}: nothing can be gathered", field="limits" if shut else "routes")
