"""How many bytes ``limits.host_bytes`` leaves for host copies, staging slots, and shards that rest in host memory."""

from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from megatron_ext.bounds.feasibility import check_limits
from megatron_ext.bounds.memory_headroom import groups_of_rank
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.host_slots import LEAST_SLOTS, host_add_bytes, host_gradients
from megatron_ext.schedule.memory_bill import on_nodes, resting_bytes
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.state_layout import gradient_slot_bytes, region_bytes
from megatron_ext.workload.workload import Workload


@lru_cache(maxsize=4)
def optimizer_on_host(workload: Workload, *, on_drive: bool) -> list[int]:
    """Bytes of host memory that the optimizer takes on each node; 0 if it steps on the device.

    All of its states are in memory. With ``on_drive``, some states are on the drive: those for which it takes the least
    memory. A slot is as large as the largest parameter on the drive, so keeping the largest parameters in memory may
    take less.
    """
    of_ranks, settings = [0] * workload.parallel.pp, workload.optimizer
    for pp_rank in range(workload.parallel.pp if settings.on_host else 0):
        groups = groups_of_rank(workload, pp_rank, None, single=False)
        of_ranks[pp_rank] = sum(resting_bytes(groups, workload)[1].values())
        if not on_drive:
            continue
        parameters = [p for chunk in workload.chunks_of_rank(pp_rank) for p in chunk.parameters]
        parts = [(-(-p.numel // workload.parallel.ranks_of(p.expert)), p.dtype) for p in parameters]
        moments, groups = len(settings.moment_dtypes), [replace(group, states_rest="nvme") for group in groups]
        held = sum(resting_bytes(groups, workload)[1].values())
        for numel, dtype in sorted(parts, reverse=True):  # this parameter and all smaller ones are on the drive
            region = region_bytes(numel, moments)
            room = 0 if settings.delayed else gradient_slot_bytes(region, moments)
            of_ranks[pp_rank] = min(of_ranks[pp_rank], held + LEAST_SLOTS * (region + room))
            held += numel * (settings.main_item_bytes(dtype) + settings.state_item_bytes)
    return on_nodes(workload, of_ranks)


def with_host_room(workload: Workload) -> Workload:
    """The workload with ``limits.pinned_host_bytes`` lowered to what ``limits.host_bytes`` leaves next to the
    optimizer. Staging slots that need more than that are removed."""
    limits = workload.limits
    if limits.host_bytes is None:
        return workload
    check_limits(workload)
    left = max(limits.host_bytes - max(optimizer_on_host(workload, on_drive=True)), 0)
    pinned = left if limits.pinned_host_bytes is None else min(left, limits.pinned_host_bytes)
    workload = workload.with_limits(pinned_host_bytes=pinned)
    try:
        check_limits(workload)
    except InputError:
        return workload.with_limits(nvme_slots=0, nvme_slot_bytes=None)
    return workload


def pinned_limit(workload: Workload, groups: Sequence[Group], states_in_memory: bool = False) -> int | None:
    """The lesser of ``limits.pinned_host_bytes`` and what ``limits.host_bytes`` leaves next to the optimizer and to
    gradients in host memory; None if neither limit is given.

    Args:
        states_in_memory: no optimizer state is moved to the drive to make room.
    """
    limits = workload.limits
    if limits.host_bytes is None:
        return limits.pinned_host_bytes
    owned = ([group for group in groups if group.pp_rank == rank] for rank in range(workload.parallel.pp))
    of_ranks = [sum(host_gradients(own, workload)) + host_add_bytes(own, workload) for own in owned]
    optimizer = optimizer_on_host(workload, on_drive=not states_in_memory)
    held = max(map(sum, zip(on_nodes(workload, of_ranks), optimizer)))
    left = limits.host_bytes - held
    return left if limits.pinned_host_bytes is None else min(left, limits.pinned_host_bytes)
