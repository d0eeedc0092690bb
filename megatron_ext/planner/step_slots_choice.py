"""Whether gradients and parameters pass to and from the host's optimizer through slots, and where these are cast."""

from typing import Literal

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.match import check_device_bytes
from megatron_ext.schedule.state_placement import host_bytes_of_nodes
from megatron_ext.schedule.step_slots import LEAST_SLOTS, SLOTS, largest_gradient, planned_slot_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule, StepSlots
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


def with_step_slots(schedule: Schedule, workload: Workload, timing: Timing) -> Schedule:
    """The schedule with slots where the host then holds less than with Megatron's copy of all gradients, and new
    parameters cast where the table says that the host's step is shorter and the device has room."""
    settings = workload.optimizer
    on_host = [group for group in schedule.groups if group.states_rest is None]
    if not settings.on_host or settings.delayed or not timing.offers_curve("host_step") or not on_host:
        return schedule
    largest = max(largest_gradient(group, workload) for group in on_host)
    in_all = max(
        sum(2 * group.bytes // group.ranks for group in on_host if group.pp_rank == rank)
        for rank in range(workload.parallel.pp)
    )
    size = planned_slot_bytes(largest, in_all)

    def step_us(cast: Literal["host", "device"]) -> float:
        return sum(timing.among(group.ranks).host_step_us(group.bytes, cast) for group in on_host)

    casts: list[Literal["host", "device"]] = ["host", "device"]
    limit = workload.limits.host_bytes
    for cast in sorted(casts, key=step_us):
        for slots in (SLOTS, LEAST_SLOTS):
            tried = replace(schedule, step_slots=StepSlots(slots=slots, slot_bytes=size, cast=cast))
            if limit is None or max(host_bytes_of_nodes(tried, workload)) <= limit:
                break  # states that go to the drive would make room for more slots
        if saves_host_memory(tried, workload) and _fits(tried, workload):
            return tried
    return schedule


def without_useless_slots(schedule: Schedule, workload: Workload) -> Schedule:
    """The schedule without slots where no states are in host memory, or so few that a copy of their gradients takes no
    more than the slots, which then save nothing."""
    slots = schedule.step_slots
    on_host = any(group.states_rest is None for group in schedule.groups)
    if slots is None or (on_host and (slots.cast == "device" or saves_host_memory(schedule, workload))):
        return schedule
    return replace(schedule, step_slots=None)


def saves_host_memory(schedule: Schedule, workload: Workload) -> bool:
    """Whether the node that holds most holds less with ``step_slots`` than without."""
    held, without = (max(host_bytes_of_nodes(s, workload)) for s in (schedule, replace(schedule, step_slots=None)))
    return held < without


def _fits(schedule: Schedule, workload: Workload) -> bool:
    limit = workload.limits.device_bytes
    if limit is None:
        return True
    try:
        check_device_bytes(schedule, workload, limit)
    except InputError:
        return False
    return True
