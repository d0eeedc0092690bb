"""Where optimizer states rest: in memory, or on the drive as far as ``limits.host_bytes`` asks for it."""

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.memory_bill import copies_of_whole, host_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule, StateSlots
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.drive_reads import SECTOR_BYTES
from megatron_ext.workload.nodes import pinned_bytes_of_nodes
from megatron_ext.workload.state_layout import region_bytes
from megatron_ext.workload.workload import Workload

SLOTS = 8
"""Slots: one is stepped, the others are read and written at the same time. With 3 larger ones in the same memory a
drive waits for the step between two reads: a third of the rate was measured."""

FEW_SLOTS = 3
"""Where memory is short: one is read, one stepped and one written at the same time."""

LEAST_SLOTS = 2
"""Where memory is shortest: reading waits for writing."""

LARGE_SLOT_BYTES = 16 << 20
"""Bytes of a piece that is read and written at a drive's full rate."""


def check_state_slots(schedule: Schedule, *, file=None) -> None:
    """Refuse states on the drive without slots to pass through, slots and ``rollback_bytes`` of 0 without such states,
    and states on the device of a group that rests in host memory.

    Raises:
        InputError: naming the field.
    """
    for index, group in enumerate(schedule.groups):
        for field in ("gradients", "shard_rests"):
            if group.states_rest == "device" and getattr(group, field) == "host":
                raise InputError(
                    f"is stepped on the device, so its {field} cannot be 'host'",
                    file=file,
                    field=f"groups[{index}].states_rest",
                    value="device",
                )
    on_drive = [index for index, group in enumerate(schedule.groups) if group.states_rest == "nvme"]
    slots, rollback = schedule.state_slots, schedule.rollback_bytes
    if rollback is not None and rollback < (1 if slots is None else 0):
        raise InputError("expected at least 1, or no such field", file=file, field="rollback_bytes", value=rollback)
    if slots is None:
        if on_drive:
            raise InputError(
                "needs state_slots to pass through", file=file, field=f"groups[{on_drive[0]}].states_rest", value="nvme"
            )
        return
    if not on_drive:
        raise InputError("no group's states rest on the drive", file=file, field="state_slots")
    if slots.slots < LEAST_SLOTS:
        raise InputError(f"expected at least {LEAST_SLOTS}", file=file, field="state_slots.slots", value=slots.slots)
    if slots.slot_bytes < SECTOR_BYTES or slots.slot_bytes % SECTOR_BYTES:
        raise InputError(
            f"expected a multiple of {SECTOR_BYTES}", file=file, field="state_slots.slot_bytes", value=slots.slot_bytes
        )


def check_states(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse states that the run's optimizer cannot step where they rest, and steps that it cannot take beside the
    backward.

    Raises:
        InputError: the optimizer steps on the device, gradients are in 16 bits where one that is clipped must be told
            from one that is not, or a slot is too small for one parameter.
    """
    on_device = [index for index, group in enumerate(schedule.groups) if group.states_rest == "device"]
    asked = [(f"groups[{index}].states_rest", "states on the device") for index in on_device[:1]]
    for field, what in (("rollback_bytes", "steps beside the backward"), ("state_slots", "states on the drive")):
        asked += [(field, what)] if getattr(schedule, field) is not None else []
    for field, what in asked:
        if not workload.optimizer.on_host:
            raise InputError(
                "the optimizer steps on the device; train with --optimizer-cpu-offload", file=file, field=field
            )
        if workload.optimizer.delayed and field != "state_slots":
            raise InputError(f"{what} cannot be combined with --delayed-parameter-update", file=file, field=field)
    if schedule.rollback_bytes is not None and workload.optimizer.gradient_dtype != "float32":
        raise InputError(
            "a step beside the backward needs gradients whose product with any other factor than 1 differs, which "
            f"rounding to {workload.optimizer.gradient_dtype} hides; train with --accumulate-allreduce-grads-in-fp32",
            file=file,
            field="rollback_bytes",
        )
    slots = schedule.state_slots
    if slots is None:
        return
    for index, group in enumerate(schedule.groups):
        if group.states_rest == "nvme" and (need := largest_region(schedule, workload, index)) > slots.slot_bytes:
            raise InputError(
                f"group {index} needs {need} bytes for one parameter and its moments",
                file=file,
                field="state_slots.slot_bytes",
                value=slots.slot_bytes,
            )


def largest_region(schedule: Schedule, workload: Workload, index: int) -> int:
    """The most bytes that one parameter of a group takes in a slot: its part in one shard, with its moments."""
    group, moments = schedule.groups[index], len(workload.optimizer.moment_dtypes)
    chunk = workload.chunk(group.pp_rank, group.model_chunk_id)
    members = [p for p in chunk.parameters if p.name in set(group.parameters)]
    shard = group.bytes // ITEM_BYTES[members[0].dtype] // group.ranks
    return max(region_bytes(min(p.numel, shard), moments) for p in members)


def with_states_on_drive(schedule: Schedule, workload: Workload, order: list[int] | None = None) -> Schedule:
    """The schedule with as few optimizer states on the drive as ``limits.host_bytes`` allows.

    Args:
        order: groups whose states go there first; by default the largest, so that they are few and their pieces long.
            Those whose states rest on the device stay.

    Raises:
        InputError: they do not fit with all of them there, or the optimizer does not step on the host.
    """
    limit = workload.limits.host_bytes
    if limit is None or max(host_bytes_of_nodes(schedule, workload)) <= limit:
        return schedule

    if not workload.optimizer.on_host:
        raise short_of_host(
            schedule, workload, " (without --optimizer-cpu-offload no optimizer state rests on the drive)"
        )
    order = order or sorted(range(len(schedule.groups)), key=lambda index: (-schedule.groups[index].bytes, index))
    order = [index for index in order if schedule.groups[index].states_rest != "device"]
    if not order:
        raise short_of_host(schedule, workload)
    fits, most = None, len(order)
    least = 1
    while least <= most:
        number = (least + most) // 2
        tried = _move(schedule, workload, order[:number])
        if max(host_bytes_of_nodes(tried, workload)) <= limit:
            fits, most = tried, number - 1
        else:
            least = number + 1
    for slots in (FEW_SLOTS, LEAST_SLOTS):
        if fits is None or max(host_bytes_of_nodes(fits, workload)) > limit:
            fits = _move(schedule, workload, order, most=0, slots=slots)
    assert fits is not None
    if (need := max(host_bytes_of_nodes(fits, workload))) > limit:
        if need > max(host_bytes_of_nodes(schedule, workload)):  # slots of a small model
            raise short_of_host(schedule, workload)
        raise short_of_host(fits, workload, " with all optimizer states on the drive")
    return fits


def short_of_host(schedule: Schedule, workload: Workload, why: str = "") -> InputError:
    """The error for a schedule with which a node holds more than ``limits.host_bytes``: what its ranks hold, by kind,
    and the settings that free some of it. All bytes are those of the node."""
    limit, of_ranks = workload.limits.host_bytes, host_bytes(schedule, workload)
    assert limit is not None
    nodes = host_bytes_of_nodes(schedule, workload)
    node = max(range(len(nodes)), key=nodes.__getitem__)
    held = {
        kind: on_nodes(workload, [kinds.get(kind, 0) for kinds in of_ranks])[node]
        for kind in dict.fromkeys(kind for kinds in of_ranks for kind in kinds)
    }
    kinds = ", ".join(f"{kind.replace('_', ' ')} {size}" for kind, size in held.items() if size)
    settings = []
    resting = any(group.gradients == "host" or group.shard_rests == "host" for group in schedule.groups)
    if resting and workload.limits.device_bytes is not None:
        settings.append("a larger limits.device_bytes keeps gradients and shards on the device")
    if held.get("host_copies"):
        settings.append(f"limits.pinned_host_bytes 0 frees host copies of {held['host_copies']}")
    if held.get("main_parameters"):
        freed = held["main_parameters"] + held.get("optimizer_states", 0)
        settings.append(f"the optimizer on the device frees {freed}")
    settings.append("fewer ranks a node divide the rest")
    return InputError(
        f"cannot fit: node {node} holds at least {nodes[node]} bytes in host memory ({kinds}){why}, "
        f"{nodes[node] - limit} bytes short; {', '.join(settings)}",
        field="limits.host_bytes",
        value=limit,
    )


def on_nodes(workload: Workload, of_ranks: list[int]) -> list[int]:
    """By node, the sum over its ranks of what every rank of a pipeline rank has."""
    return pinned_bytes_of_nodes(workload.parallel, {}, of_ranks)


def host_bytes_of_nodes(schedule: Schedule, workload: Workload) -> list[int]:
    """Host memory that the ranks of each node hold by the memory bill."""
    return on_nodes(workload, [sum(kinds.values()) for kinds in host_bytes(schedule, workload)])


def host_bytes_taken(schedule: Schedule, workload: Workload, loaded: bool = False, saved: bool = False) -> list[int]:
    """Host memory of each node that a run takes between its setup and the end of its first iteration: host copies,
    staging slots, shards that rest there, and optimizer states. Gradients and main parameters are there before, and so
    are states that were ``loaded`` from a checkpoint. A checkpoint that is ``saved`` takes copies of what never fits
    whole."""
    taken = {"host_copies", "staging_slots", "shards", "optimizer_states", "previous_states", "next_parameters"}
    taken -= {"optimizer_states"} if loaded else set()
    of_ranks = [sum(kinds.get(kind, 0) for kind in taken) for kinds in host_bytes(schedule, workload)]
    copies = copies_of_whole(schedule) if saved else [0] * len(of_ranks)
    return on_nodes(workload, [held + copied for held, copied in zip(of_ranks, copies, strict=True)])


def _move(
    schedule: Schedule, workload: Workload, chosen: list[int], most: int = LARGE_SLOT_BYTES, slots: int | None = None
) -> Schedule:
    """The schedule with the states of the groups ``chosen`` on the drive; slots of ``most`` bytes where that holds a
    parameter, by default as many as an eighth of these states has room for, within reason."""
    groups = list(schedule.groups)
    for index in chosen:
        groups[index] = replace(groups[index], states_rest="nvme")
    largest = max(largest_region(schedule, workload, index) for index in chosen)
    moments = len(workload.optimizer.moment_dtypes)
    in_all = sum(region_bytes(groups[i].bytes // groups[i].ranks // 2, moments) for i in chosen)
    size = max(largest, min(most, in_all // (8 * SLOTS) // SECTOR_BYTES * SECTOR_BYTES))
    slots = slots or min(max(in_all // (8 * size), FEW_SLOTS), SLOTS)
    return replace(schedule, groups=tuple(groups), state_slots=StateSlots(slots=slots, slot_bytes=size))
