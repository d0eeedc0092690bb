"""How many bytes ``limits.host_bytes`` leaves for host copies, staging slots, and shards that rest in host memory."""

from collections.abc import Sequence

from msgspec.structs import replace

from megatron_ext.bounds.feasibility import check_limits
from megatron_ext.bounds.memory_headroom import groups_of_rank
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.host_slots import LEAST_SLOTS, host_add_bytes, host_gradients
from megatron_ext.schedule.memory_bill import on_nodes, resting_bytes
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.state_layout import gradient_slot_bytes, region_bytes
from megatron_ext.workload.workload import Workload


def optimizer_on_host(workload: Workload, *, on_drive: bool) -> list[int]:
    """Host memory of each node that the optimizer takes, with its states in memory or all of them on the drive; 0
    where it steps on the device."""
    of_ranks = [0] * workload.parallel.pp
    for pp_rank in range(workload.parallel.pp if workload.optimizer.on_host else 0):
        groups = groups_of_rank(workload, pp_rank, None, single=False)
        if on_drive:
            parameters = [p for chunk in workload.chunks_of_rank(pp_rank) for p in chunk.parameters]
            moments = len(workload.optimizer.moment_dtypes)
            parts = [-(-p.numel // workload.parallel.ranks_of(p.expert)) for p in parameters]
            largest = max((region_bytes(numel, moments) for numel in parts), default=0)
            room = 0 if workload.optimizer.delayed else gradient_slot_bytes(largest, moments)
            of_ranks[pp_rank] = LEAST_SLOTS * (largest + room)
            groups = [replace(group, states_rest="nvme") for group in groups]
        of_ranks[pp_rank] += sum(resting_bytes(groups, workload)[1].values())
    return on_nodes(workload, of_ranks)


def least_of_optimizer(workload: Workload) -> list[int]:
    """Host memory of each node that the optimizer takes at least."""
    return [*map(min, *(optimizer_on_host(workload, on_drive=on_drive) for on_drive in (False, True)))]


def with_host_room(workload: Workload) -> Workload:
    """The workload with ``limits.pinned_host_bytes`` at most what ``limits.host_bytes`` leaves next to the optimizer,
    and without staging slots that need more."""
    limits = workload.limits
    if limits.host_bytes is None:
        return workload
    check_limits(workload)
    left = max(limits.host_bytes - max(least_of_optimizer(workload)), 0)
    pinned = left if limits.pinned_host_bytes is None else min(left, limits.pinned_host_bytes)
    workload = workload.with_limits(pinned_host_bytes=pinned)
    try:
        return check_limits(workload)
    except InputError:
        return workload.with_limits(nvme_slots=0, nvme_slot_bytes=None)


def pinned_limit(workload: Workload, groups: Sequence[Group], states_in_memory: bool = False) -> int | None:
    """``limits.pinned_host_bytes``, or what ``limits.host_bytes`` leaves next to gradients in host memory, if less.

    Args:
        states_in_memory: no optimizer state goes to the drive to make room.
    """
    limits = workload.limits
    if limits.host_bytes is None:
        return limits.pinned_host_bytes
    owned = ([group for group in groups if group.pp_rank == rank] for rank in range(workload.parallel.pp))
    of_ranks = [sum(host_gradients(own, workload)) + host_add_bytes(own, workload) for own in owned]
    optimizer = optimizer_on_host(workload, on_drive=False) if states_in_memory else least_of_optimizer(workload)
    held = max(map(sum, zip(on_nodes(workload, of_ranks), optimizer)))
    left = limits.host_bytes - held
    return left if limits.pinned_host_bytes is None else min(left, limits.pinned_host_bytes)
