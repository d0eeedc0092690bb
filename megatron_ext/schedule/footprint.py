"""Memory that a schedule needs: whole parameters on devices, pinned host memory on nodes."""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate

from megatron_ext.schedule.user_defined_schedule import Group, Rank, Schedule, Unshard
from megatron_ext.workload.nodes import copies_of_nobody, nodes_spanned, pinned_bytes_of_nodes
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.route import ON_DRIVE, ON_HOST
from megatron_ext.workload.workload import Workload

PUBLISHED_AT_ONCE = 2
"""Groups whose shards are on their way to other nodes, or to the drive, at the same time."""


def over_limit(needs: Iterable[int], limit: int | None) -> Iterator[tuple[int, int, int]]:
    """(index, bytes, bytes above the limit) of every need that is larger than ``limit``; None is unlimited."""
    for index, need in enumerate(needs):
        if limit is not None and need > limit:
            yield index, need, need - limit


def device_peaks(schedule: Schedule) -> list[int]:
    """Peak bytes of whole parameters on the device of each pipeline rank.

    A group counts from the issue of its unshard to its reshard. Below zero stage 3 all groups count.
    """
    return [_peak(schedule, rank) for rank in schedule.ranks]


def _peak(schedule: Schedule, rank: Rank) -> int:
    if schedule.zero_stage < 3:
        return sum(group.bytes for group in schedule.groups if group.pp_rank == rank.pp_rank)
    actions = [*rank.start.unshard, *(action for entry in rank.steps for action in actions_in_order(entry))]
    sizes = (schedule.groups[a.group].bytes * (1 if isinstance(a, Unshard) else -1) for a in actions)
    return max(accumulate(sizes), default=0)


def actions_in_order(entry):
    """Unshards and reshards of one step in the order in which they happen."""
    if all(a.at < 0 for a in entry.unshard) and all(a.at < 0 for a in entry.reshard):
        return (*entry.unshard, *entry.reshard)
    sign = -1 if "B" in entry.step else 1
    freed = [a for a in entry.reshard if a.at >= 0]
    inside = sorted((*entry.unshard, *freed), key=lambda a: (a.at >= 0, sign * a.at))  # of one layer, unshards first
    return (*inside, *(a for a in entry.reshard if a.at < 0))


def slot_bytes(schedule: Schedule, pp_rank: int) -> int:
    """Bytes of one NVMe staging slot of ``pp_rank``; 0 if it stages nothing."""
    published = (schedule.groups[entry.group] for entry in schedule.publish if ON_DRIVE in entry.to)
    staged = [group.bytes for group in published if group.pp_rank == pp_rank]
    return (schedule.limits.nvme_slot_bytes or max(staged)) if staged else 0


def bounce_bytes(group: Group, parallel: Parallel) -> int:
    """Bytes of a rank's buffers through which a group's shards go to the drive, if it has no host copy."""
    return PUBLISHED_AT_ONCE * group.bytes // group.ranks * nodes_spanned(parallel, group.pp_rank, group.ranks)


def pinned_host_bytes(schedule: Schedule) -> list[int]:
    """Bytes of pinned host memory that a schedule needs on each node."""
    hosted, staged = ({entry.group for entry in schedule.publish if copy in entry.to} for copy in (ON_HOST, ON_DRIVE))
    return pinned_need(schedule, schedule.groups, hosted, staged)


def pinned_need(
    of: Schedule | Workload, groups: Sequence[Group], hosted: Container[int], staged: Container[int] = ()
) -> list[int]:
    """Bytes of pinned host memory on each node: one host copy of every ``hosted`` group, the staging slots of ranks
    with ``staged`` groups, the buffers through which shards go only to the drive, and shards that rest in host memory.
    Buffers for the shards of other nodes are counted, although they are not pinned.
    """
    parallel, limits = of.parallel, of.limits
    copies, slot_sizes, bounced, of_ranks = copies_of_nobody(parallel), *([0] * parallel.pp for _ in range(3))
    for index, group in enumerate(groups):
        rank = group.pp_rank
        copies[group.ranks][rank] += group.bytes if index in hosted else 0
        of_ranks[rank] += group.bytes // group.ranks if group.shard_rests == "host" else 0
        if index in staged:
            slot_sizes[rank] = limits.nvme_slot_bytes or max(slot_sizes[rank], group.bytes)
            bounced[rank] = max(bounced[rank], 0 if index in hosted else bounce_bytes(group, parallel))
    sizes = zip(of_ranks, slot_sizes, bounced)
    of_ranks = [held + limits.nvme_slots * slot + bounce for held, slot, bounce in sizes]
    return pinned_bytes_of_nodes(parallel, copies, of_ranks)
