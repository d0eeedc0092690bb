"""Optimizer states on the drive, as few as ``limits.host_bytes`` asks for."""

from collections import Counter
from itertools import product

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import kinds_text, size_text
from megatron_ext.schedule.group_facts import largest_region
from megatron_ext.schedule.host_slots import LEAST_SLOTS
from megatron_ext.schedule.memory_bill import host_bytes, host_bytes_of_nodes, on_nodes
from megatron_ext.schedule.user_defined_schedule import Schedule, StateSlots
from megatron_ext.workload.drive_reads import SECTOR_BYTES
from megatron_ext.workload.state_layout import region_bytes
from megatron_ext.workload.workload import Workload

STATE_SLOTS = 8
"""Number of slots: one is stepped while the others are read and written. With 3 larger slots in the same memory, a
drive waits for the step between two reads: a third of the rate was measured."""

FEW_SLOTS = 3
"""Number of slots if memory is short: one is read, one is stepped and one is written at the same time."""

LARGE_PIECE_BYTES = 16 << 20
"""Bytes of a piece that is read and written at a drive's full rate."""


def with_states_on_drive(schedule: Schedule, workload: Workload, order: list[int] | None = None) -> Schedule:
    """The schedule with as few optimizer states on the drive as ``limits.host_bytes`` allows.

    Args:
        order: groups whose states are moved to the drive first. By default the largest groups, so that few groups are
            moved and their pieces are long. Groups whose states rest on the device are not moved.

    Raises:
        InputError: the states fit in no arrangement, or the optimizer does not step on the host.
    """
    limit = workload.limits.host_bytes
    if limit is None or max(host_bytes_of_nodes(schedule, workload)) <= limit:
        return schedule
    if not workload.optimizer.on_host:
        why = " (without --optimizer-cpu-offload no optimizer state rests on the drive)"
        raise short_of_host(schedule, workload, why)
    order = order or sorted(range(len(schedule.groups)), key=lambda index: (-schedule.groups[index].bytes, index))
    order = [index for index in order if schedule.groups[index].states_rest != "device"]
    fits, least, most = None, 1, len(order)
    while least <= most:  # ends: each turn halves the range
        number = (least + most) // 2
        tried = _moved(schedule, workload, order[:number])
        if max(host_bytes_of_nodes(tried, workload)) <= limit:
            fits, most = tried, number - 1
        else:
            least = number + 1
    fits = fits or least_in_memory(schedule, workload, order)
    if max(host_bytes_of_nodes(fits, workload)) > limit:
        raise short_of_host(fits, workload, " with optimizer states on the drive" if fits.state_slots else "")
    return fits


def least_in_memory(schedule: Schedule, workload: Workload, order: list[int]) -> Schedule:
    """The schedule with the states of some groups of ``order`` on the drive, chosen so that the fullest node keeps
    ``limits.host_bytes``, or else holds as little as possible. It uses few slots of the size that the largest parameter
    on the drive needs."""
    held, best = lambda one: max(host_bytes_of_nodes(one, workload)), schedule
    regions = {index: largest_region(schedule.groups[index], workload) for index in order}
    for slots, most in product((FEW_SLOTS, LEAST_SLOTS), sorted({*regions.values()}, reverse=True)):
        tried = _moved(schedule, workload, [i for i in order if regions[i] <= most], most=0, slots=slots)
        best = min(best, tried, key=held)
        if held(best) <= (workload.limits.host_bytes or 0):
            break
    return best


def _moved(
    schedule: Schedule, workload: Workload, chosen: list[int], most: int = LARGE_PIECE_BYTES, slots: int | None = None
) -> Schedule:
    """The schedule with the states of the groups ``chosen`` on the drive. Slots have up to ``most`` bytes, but at least
    room for the largest parameter. By default there are as many slots as fit into an eighth of the bytes of these
    states on the rank that has most of them, from ``FEW_SLOTS`` to ``STATE_SLOTS``."""
    groups, of_ranks, moments = list(schedule.groups), Counter(), len(workload.optimizer.moment_dtypes)
    for index in chosen:
        groups[index] = group = replace(groups[index], states_rest="nvme")
        of_ranks[group.pp_rank] += region_bytes(group.bytes // group.ranks // 2, moments)
    largest, in_all = max(largest_region(groups[index], workload) for index in chosen), max(of_ranks.values())
    size = max(largest, min(most, in_all // (8 * STATE_SLOTS) // SECTOR_BYTES * SECTOR_BYTES))
    slots = slots or min(max(in_all // (8 * size), FEW_SLOTS), STATE_SLOTS)
    return replace(schedule, groups=tuple(groups), state_slots=StateSlots(slots=slots, slot_bytes=size))


def short_of_host(schedule: Schedule, workload: Workload, why: str = "") -> InputError:
    """The error for a schedule with which a node holds more than ``limits.host_bytes``. Its message says what the
    node's ranks hold, by kind, and which settings free some of it. All bytes are sums over the node."""
    limit, of_ranks = workload.limits.host_bytes, host_bytes(schedule, workload)
    assert limit is not None
    nodes = host_bytes_of_nodes(schedule, workload)
    node = max(range(len(nodes)), key=nodes.__getitem__)
    held = {
        kind: on_nodes(workload, [kinds.get(kind, 0) for kinds in of_ranks])[node]
        for kind in dict.fromkeys(kind for kinds in of_ranks for kind in kinds)
    }
    settings = []
    resting = any(group.gradients == "host" or group.shard_rests == "host" for group in schedule.groups)
    if resting and workload.limits.device_bytes is not None:
        settings.append("a larger limits.device_bytes keeps gradients and shards on the device")
    if held.get("host_copies"):
        settings.append(f"limits.pinned_host_bytes 0 frees host copies of {size_text(held['host_copies'])}")
    if held.get("main_parameters"):
        freed = held["main_parameters"] + held.get("optimizer_states", 0)
        settings.append(f"the optimizer on the device frees {size_text(freed)}")
    settings.append("with fewer ranks per node a node holds less")
    return InputError(
        f"cannot fit by any plan that was found: with the least memory, node {node} holds {nodes[node]} bytes in "
        f"host memory ({kinds_text(held)}){why}, {nodes[node] - limit} bytes short; {', '.join(settings)}",
        field="limits.host_bytes",
        value=limit,
    )
