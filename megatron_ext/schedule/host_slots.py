"""The slots that gradients, parameters and states of the host's optimizer pass through: how many there are and how
large they are, and the buffers on the device that go with them."""

from collections.abc import Iterable

from megatron_ext.schedule.group_facts import gradient_bytes, largest_gradient
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.workload.state_layout import GRADIENT_SLOTS, LINE_BYTES, ROUNDING_BYTES, gradient_slot_bytes
from megatron_ext.workload.workload import Workload

LEAST_SLOTS, SLOTS = 2, 4
"""With two slots the gradient of the next unit arrives while the current unit is stepped. Plans use four, so that more
units can arrive and leave meanwhile. States on the drive need at least two as well, because reading waits for
writing."""

LARGE_SLOT_BYTES = 32 << 20
"""Bytes of a piece that is large enough for a link to copy it at its full rate."""

PART = 32
"""A planned slot holds at most 1 / PART of a rank's gradients, unless one parameter needs more."""


def planned_slot_bytes(largest: int, in_all: int) -> int:
    """Bytes of a step slot that a plan chooses for a rank. Its gradients have ``in_all`` bytes in fp32, the largest
    gradient of one parameter ``largest``."""
    size = max(largest, min(LARGE_SLOT_BYTES, in_all // PART))
    return -(-size // LINE_BYTES) * LINE_BYTES


def cast_part_bytes(slot_bytes: int) -> int:
    """Bytes of one part of the fp32 parameters that become 16-bit on the device. The part has a buffer of that size on
    the device, and another of half the size for the 16-bit result."""
    return min(slot_bytes, LARGE_SLOT_BYTES)


def step_slots_bytes(schedule: Schedule, workload: Workload, groups: list[Group]) -> tuple[int, int]:
    """Bytes of the step slots of a rank with ``groups``: in host memory, and on the device. There parameters pass in
    parts, and gradients that are not fp32 through one buffer, which states on the drive share."""
    slots = schedule.step_slots
    if slots is None or not any(group.states_rest is None for group in groups):
        return 0, 0
    gradients = slots.slots * slots.slot_bytes
    if slots.cast == "host":
        return gradients + gradients // 2, 0
    more = slots.slot_bytes - narrow_gradient_bytes(groups, workload)
    wide = max(more, 0) if workload.optimizer.gradient_dtype != "float32" else 0
    return gradients, cast_part_bytes(slots.slot_bytes) * 3 // 2 + wide


def state_slots_bytes(schedule: Schedule, workload: Workload, groups: list[Group]) -> int:
    """Bytes of the slots through which states on the drive pass on a rank with ``groups``, and of the memory next to
    each slot, through which gradients arrive and parameters leave."""
    slots, on_drive = schedule.state_slots, [group for group in groups if group.states_rest == "nvme"]
    if slots is None or not on_drive:
        return 0
    settings = workload.optimizer
    room = 0 if settings.delayed else gradient_slot_bytes(slots.slot_bytes, len(settings.moment_dtypes))
    return slots.slots * (slots.slot_bytes + room)


def host_gradients(groups: Iterable[Group], workload: Workload) -> list[int]:
    """Bytes of each gradient shard that rests in host memory."""
    return [gradient_bytes(group, workload) // group.ranks for group in groups if group.gradients == "host"]


def host_add_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Bytes of the slots through which gradients reach their sums in host memory, on a rank with ``groups``."""
    return GRADIENT_SLOTS * max(host_gradients(groups, workload), default=0)


def step_gradient_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Bytes on the device of the gradients that rest in host memory, when an optimizer on the device copies them there
    for its step. It copies all of them at once, because their norm is computed before the first update."""
    return 0 if workload.optimizer.on_host else sum(host_gradients(groups, workload))


def narrow_gradient_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Bytes of the buffer on the device in which 16-bit gradients become fp32, if the states rest on the drive or
    updates are delayed."""
    settings = workload.optimizer
    if settings.gradient_dtype == "float32":
        return 0
    chosen = (group for group in groups if settings.delayed or group.states_rest == "nvme")
    return max((largest_gradient(group, workload) for group in chosen), default=0)


def rounding_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Bytes of the buffer on the device through which an optimizer on the device writes shards in host memory."""
    if workload.optimizer.on_host:
        return 0
    fp32 = [largest_gradient(group, workload) for group in groups if group.shard_rests == "host"]
    return min(max(fp32, default=0) // 2, ROUNDING_BYTES)
