"""Checks of where shards and optimizer states rest, and of the slots that they pass through: by the schedule alone, and
against the run's optimizer."""

from megatron_ext.formats.checks import Checker
from megatron_ext.schedule.group_facts import largest_gradient, largest_region, members_of, steps_on_host_shards
from megatron_ext.schedule.host_slots import LEAST_SLOTS
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import SECTOR_BYTES
from megatron_ext.workload.state_layout import LINE_BYTES
from megatron_ext.workload.workload import Workload

_ON_DEVICE = "the optimizer steps on the device; train with --optimizer-cpu-offload"


def check_rests(schedule: Schedule, check: Checker) -> None:
    """Refuse states on the device for a group that rests in host memory, states on the drive without slots to pass
    through, slots that no group needs, too few slots, and slot sizes that are not a multiple of the unit that is read
    or copied.

    Raises:
        InputError: of the checker's class, naming the field.
    """
    groups, state_slots, rollback = schedule.groups, schedule.state_slots, schedule.rollback_bytes
    for index, group in enumerate(groups):
        for name in ("gradients", "shard_rests"):
            if group.states_rest == "device" and getattr(group, name) == "host":
                said = f"is stepped on the device, so its {name} cannot be 'host'"
                check.refuse(said, f"groups[{index}].states_rest", "device")
    if rollback is not None and rollback < (1 if state_slots is None else 0):
        check.refuse("expected at least 1; leave the field out to wait for the norm", "rollback_bytes", rollback)
    on_drive = [index for index, group in enumerate(groups) if group.states_rest == "nvme"]
    if on_drive and state_slots is None:
        check.refuse("needs state_slots to pass through", f"groups[{on_drive[0]}].states_rest", "nvme")
    in_memory = any(group.states_rest is None for group in groups)
    for name, used, nobody, unit in (
        ("state_slots", bool(on_drive), "no group's states rest on the drive", SECTOR_BYTES),
        ("step_slots", in_memory, "no group's states are in host memory", LINE_BYTES),
    ):
        slots = getattr(schedule, name)
        if slots is None:
            continue
        if not used:
            check.refuse(nobody, name)
        if slots.slots < LEAST_SLOTS:
            check.refuse(f"expected at least {LEAST_SLOTS}", f"{name}.slots", slots.slots)
        if slots.slot_bytes < unit or slots.slot_bytes % unit:
            check.refuse(f"expected a multiple of {unit}", f"{name}.slot_bytes", slots.slot_bytes)


def check_rests_of_run(schedule: Schedule, workload: Workload, check: Checker) -> None:
    """Refuse shards and states that the run's optimizer cannot step where they rest, slots and steps during the
    backward that do not go with the run's optimizer, and slots that are too small for one parameter.

    Raises:
        InputError: of the checker's class, naming the field.
    """
    settings = workload.optimizer
    _check_host_shards(schedule, workload, check)
    on_device = [index for index, group in enumerate(schedule.groups) if group.states_rest == "device"]
    asked = [(f"groups[{index}].states_rest", "states on the device cannot") for index in on_device[:1]]
    for name, what in (
        ("rollback_bytes", "steps during the backward cannot"),
        ("state_slots", None),
        ("step_slots", "a delayed update keeps all gradients, so slots for them cannot"),
    ):
        asked += [(name, what)] if getattr(schedule, name) is not None else []
    for name, what in asked:
        if not settings.on_host:
            check.refuse(_ON_DEVICE, name)
        if settings.delayed and what:
            check.refuse(f"{what} be combined with --delayed-parameter-update", name)
    if schedule.rollback_bytes is not None and settings.gradient_dtype != "float32":
        why = f"in {settings.gradient_dtype} rounding can hide that clipping changes them"
        how = "train with --accumulate-allreduce-grads-in-fp32"
        check.refuse(f"a step during the backward needs fp32 gradients: {why}; {how}", "rollback_bytes")
    for name, rest, largest, what in (
        ("state_slots", "nvme", largest_region, "one parameter and its moments"),
        ("step_slots", None, largest_gradient, "the gradient of one parameter"),
    ):
        slots = getattr(schedule, name)
        for index, group in enumerate(schedule.groups if slots else ()):
            if group.states_rest == rest and (need := largest(group, workload)) > slots.slot_bytes:
                check.refuse(f"group {index} needs {need} bytes for {what}", f"{name}.slot_bytes", slots.slot_bytes)


def _check_host_shards(schedule: Schedule, workload: Workload, check: Checker) -> None:
    for index, group in enumerate(schedule.groups):
        if group.shard_rests == "host":
            dtypes = sorted({p.dtype for p in members_of(group, workload).parameters})
            if not all(steps_on_host_shards(workload.optimizer, dtype) for dtype in dtypes):
                said = f"the optimizer updates {'/'.join(dtypes)} parameters where it steps, which is the device"
                how = "train with --optimizer-cpu-offload"
                check.refuse(f"{said}; {how}", f"groups[{index}].shard_rests", "host")
