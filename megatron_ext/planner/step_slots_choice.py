"""Whether gradients and parameters pass to and from the host's optimizer through slots, and where these are cast."""

from typing import Literal

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.match import check_device_bytes
from megatron_ext.schedule.state_placement import host_bytes_of_nodes
from megatron_ext.schedule.step_slots import largest_gradient
from megatron_ext.schedule.user_defined_schedule import Schedule, StepSlots
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.state_layout import LINE_BYTES
from megatron_ext.workload.workload import Workload

SLOTS = 4
"""Slots: one is stepped while others arrive and leave."""

LARGE_SLOT_BYTES = 32 << 20
"""Bytes of a piece that a link copies at its full rate."""

PART = 32
"""A slot has at most this part of a rank's gradients."""


def with_step_slots(schedule: Schedule, workload: Workload, timing: Timing) -> Schedule:
    """The schedule with slots where the host then holds less than with Megatron's copy of all gradients, and new
    parameters cast where the table says that the host's step is shorter and the device has room."""
    settings = workload.optimizer
    on_host = [group for group in schedule.groups if group.states_rest is None]
    if not settings.on_host or settings.delayed or not timing.offers_curve("host_step") or not on_host:
        return schedule
    largest = max(largest_gradient(group, workload) for group in on_host)
    in_all = max(
        sum(2 * group.bytes for group in on_host if group.pp_rank == rank) for rank in range(workload.parallel.pp)
    )
    size = max(largest, min(LARGE_SLOT_BYTES, in_all // workload.parallel.dp // PART))
    size = -(-size // LINE_BYTES) * LINE_BYTES

    def step_us(cast: Literal["host", "device"]) -> float:
        return sum(timing.host_step_us(group.bytes, cast) for group in on_host)

    casts: list[Literal["host", "device"]] = ["host", "device"]
    for cast in sorted(casts, key=step_us):
        tried = replace(schedule, step_slots=StepSlots(slots=SLOTS, slot_bytes=size, cast=cast))
        if max(host_bytes_of_nodes(tried, workload)) < max(host_bytes_of_nodes(schedule, workload)) and _fits(
            tried, workload
        ):
            return tried
    return schedule


def _fits(schedule: Schedule, workload: Workload) -> bool:
    limit = workload.limits.device_bytes
    if limit is None:
        return True
    try:
        check_device_bytes(schedule, workload, limit)
    except InputError:
        return False
    return True
