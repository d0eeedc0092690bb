"""The slots through which gradients arrive at the host's optimizer and new parameters leave it: bytes and checks."""

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.state_layout import LINE_BYTES, tensor_bytes
from megatron_ext.workload.workload import Workload

LEAST_SLOTS, SLOTS = 2, 4
"""The gradient of one unit is stepped on while that of the next arrives; planned: others arrive and leave."""

LARGE_SLOT_BYTES = 32 << 20
"""Bytes of a piece that a link copies at its full rate."""

PART = 32
"""A planned slot has at most this part of a rank's gradients."""


def planned_slot_bytes(largest: int, in_all: int) -> int:
    """Of a rank whose gradients have ``in_all`` bytes in fp32, and the largest of one parameter ``largest``."""
    size = max(largest, min(LARGE_SLOT_BYTES, in_all // PART))
    return -(-size // LINE_BYTES) * LINE_BYTES


def check_step_slots(schedule: Schedule, *, file=None) -> None:
    """Refuse slots that are too few or no multiple of a cache line, and slots that no group's step needs.

    Raises:
        InputError: naming the field.
    """
    slots = schedule.step_slots
    if slots is None:
        return
    if not any(group.states_rest is None for group in schedule.groups):
        raise InputError("no group's states are in host memory", file=file, field="step_slots")
    if slots.slots < LEAST_SLOTS:
        raise InputError(f"expected at least {LEAST_SLOTS}", file=file, field="step_slots.slots", value=slots.slots)
    if slots.slot_bytes < LINE_BYTES or slots.slot_bytes % LINE_BYTES:
        raise InputError(
            f"expected a multiple of {LINE_BYTES}", file=file, field="step_slots.slot_bytes", value=slots.slot_bytes
        )


def check_steps_through_slots(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse slots of an optimizer that steps elsewhere or later, and slots smaller than one gradient.

    Raises:
        InputError: naming the field.
    """
    slots = schedule.step_slots
    if slots is None:
        return
    if not workload.optimizer.on_host:
        raise InputError(
            "the optimizer steps on the device; train with --optimizer-cpu-offload", file=file, field="step_slots"
        )
    if workload.optimizer.delayed:
        raise InputError(
            "cannot be combined with --delayed-parameter-update, which keeps all gradients of an iteration",
            file=file,
            field="step_slots",
        )
    for index, group in enumerate(schedule.groups):
        if group.states_rest is None and (need := largest_gradient(group, workload)) > slots.slot_bytes:
            raise InputError(
                f"group {index} needs {need} bytes for the gradient of one parameter",
                file=file,
                field="step_slots.slot_bytes",
                value=slots.slot_bytes,
            )


def largest_gradient(group: Group, workload: Workload) -> int:
    """The most bytes that one parameter of ``group`` takes in a slot: its part in one shard, in fp32."""
    chosen = set(group.parameters)
    members = [p for p in workload.chunk(group.pp_rank, group.model_chunk_id).parameters if p.name in chosen]
    shard = group.bytes // ITEM_BYTES[members[0].dtype] // group.ranks
    return max(tensor_bytes(min(p.numel, shard)) for p in members)


def step_slots_bytes(schedule: Schedule, workload: Workload, groups: list[Group]) -> tuple[int, int]:
    """Of the slots of a rank with ``groups``: in host memory, and on the device, where there is one for parameters and
    another for gradients that are not fp32."""
    slots = schedule.step_slots
    if slots is None or not any(group.states_rest is None for group in groups):
        return 0, 0
    gradients = slots.slots * slots.slot_bytes
    if slots.cast == "host":
        return gradients + gradients // 2, 0
    return gradients, slots.slot_bytes * (1 + (workload.optimizer.gradient_dtype != "float32"))
