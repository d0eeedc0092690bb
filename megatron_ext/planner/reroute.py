"""A schedule with other routes at the same places, and with shards moved to host memory if that costs no time."""

from collections.abc import Callable

from msgspec.structs import replace

from megatron_ext.planner.assemble import published
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.group_facts import members_of, steps_on_host_shards
from megatron_ext.schedule.user_defined_schedule import Schedule, Unshard
from megatron_ext.workload.route import SHARD_GATHER, Route, kind_of
from megatron_ext.workload.workload import Workload


def rerouted(schedule: Schedule, route_of: Callable[[Unshard], Route]) -> Schedule:
    """``schedule`` with each unshard's route replaced by ``route_of`` it. Groups are published to the copies that are
    then read."""

    def change(entry):
        return replace(entry, unshard=tuple(replace(action, route=route_of(action)) for action in entry.unshard))

    ranks = [replace(rank, start=change(rank.start), steps=tuple(map(change, rank.steps))) for rank in schedule.ranks]
    return replace(schedule, ranks=tuple(ranks), publish=published(ranks))


def by_cpu_shard(schedule: Schedule) -> Schedule:
    """The schedule with ``cpu_shard`` instead of every all-gather of device shards: each rank copies its own shard from
    host memory first."""
    from_device = lambda action: kind_of(action.route).needs_device_shard
    made = rerouted(schedule, lambda action: SHARD_GATHER if from_device(action) else action.route)
    return replace(made, groups=tuple(replace(group, algorithm=None) for group in schedule.groups))


def with_host_shards(schedule: Schedule, workload: Workload) -> Schedule:
    """The schedule with shards moved to host memory if all unshards of their groups read host memory. This costs no
    time.

    As many shards as ``limits.pinned_host_bytes`` allows are moved, in the order of the groups.
    """
    if schedule.zero_stage < 3:
        return schedule
    by_device = {action.group for action in schedule.unshards if kind_of(action.route).needs_device_shard}
    limit, parallel = schedule.limits.pinned_host_bytes, schedule.parallel
    pinned, groups = pinned_host_bytes(schedule), list(schedule.groups)
    for index, group in enumerate(groups):
        dtype = members_of(group, workload).dtype
        if index in by_device or not steps_on_host_shards(workload.optimizer, dtype):
            continue
        more = list(pinned)
        for members in parallel.replicas(group.pp_rank, group.ranks):
            for node in parallel.nodes_of(members):
                more[node] += group.bytes // group.ranks
        if limit is None or max(more) <= limit:
            pinned, groups[index] = more, replace(group, shard_rests="host")
    return replace(schedule, groups=tuple(groups))
