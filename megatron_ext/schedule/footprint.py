"""Memory that a schedule promises: whole parameters on devices, host copies on nodes."""

from collections.abc import Iterable, Iterator

from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.nodes import copies_of_nobody, pinned_bytes_of_nodes


def over_limit(needs: Iterable[int], limit: int | None) -> Iterator[tuple[int, int, int]]:
    """(index, bytes, bytes too many) of every need that is larger than ``limit``; None is unlimited."""
    for index, need in enumerate(needs):
        if limit is not None and need > limit:
            yield index, need, need - limit


def device_peaks(schedule: Schedule) -> list[int]:
    """Peak bytes of whole parameters on the device of each pipeline rank.

    A group counts from the issue of its unshard to its reshard; with zero stage 1 all count.
    """
    peaks = []
    for rank in schedule.ranks:
        if schedule.zero_stage < 3:
            peaks.append(sum(g.bytes for g in schedule.groups if g.pp_rank == rank.pp_rank))
            continue
        resident = sum(schedule.groups[a.group].bytes for a in rank.start.unshard)
        peak = resident
        whole = {a.group for a in rank.start.unshard}
        for entry in rank.steps:
            for action in in_order(entry):
                size = schedule.groups[action.group].bytes
                if hasattr(action, "route"):
                    whole.add(action.group)
                    resident += size
                    peak = max(peak, resident)
                else:
                    whole.discard(action.group)
                    resident -= size
        peaks.append(peak)
    return peaks


def in_order(entry):
    """Unshards and reshards of one step in the order in which they happen."""
    if all(a.at < 0 for a in entry.unshard) and all(a.at < 0 for a in entry.reshard):
        return (*entry.unshard, *entry.reshard)
    sign = -1 if "B" in entry.step else 1
    freed = [a for a in entry.reshard if a.at >= 0]
    inside = sorted((*entry.unshard, *freed), key=lambda a: (a.at >= 0, sign * a.at))  # of one layer, unshards first
    return (*inside, *(a for a in entry.reshard if a.at < 0))


def slot_bytes(schedule: Schedule, pp_rank: int) -> int:
    """Bytes of one NVMe staging slot of ``pp_rank``; 0 where it stages nothing."""
    staged = [
        schedule.groups[entry.group].bytes
        for entry in schedule.publish
        if "nvme" in entry.to and schedule.groups[entry.group].pp_rank == pp_rank
    ]
    if not staged:
        return 0
    return schedule.limits.nvme_slot_bytes or max(staged)


def pinned_host_bytes(schedule: Schedule) -> list[int]:
    """Pinned bytes of each node: one host copy of every published group of the pipeline
    ranks on the node, plus the staging slots of its ranks and their shards that rest in host memory."""
    parallel = schedule.parallel
    copies = copies_of_nobody(parallel)
    for entry in schedule.publish:
        if "cpu" in entry.to:
            group = schedule.groups[entry.group]
            copies[group.ranks][group.pp_rank] += group.bytes
    of_ranks = [slot_bytes(schedule, pp_rank) * schedule.limits.nvme_slots for pp_rank in range(parallel.pp)]
    for group in schedule.groups:
        if group.shard_rests == "host":
            of_ranks[group.pp_rank] += group.bytes // group.ranks
    return pinned_bytes_of_nodes(parallel, copies, of_ranks)
