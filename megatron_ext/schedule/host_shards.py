"""Which shards can rest in host memory, and a schedule in which they do."""

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule, Unshard
from megatron_ext.workload.optimizer_settings import HALF, OptimizerSettings
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

FROM_HOST: tuple[Route, ...] = ("cpu", "cpu_shard", "nvme")
"""Routes that bring a group without its shard on the device."""


def steps_on_host_shards(settings: OptimizerSettings, dtype: str) -> bool:
    """Whether the optimizer can update a shard of ``dtype`` in host memory.

    It updates 16-bit parameters through copies of its own and writes them into the shard, wherever that is. Other
    parameters it updates in place, which has to be where it steps.
    """
    return settings.on_host or dtype in HALF


def can_rest_on_host(workload: Workload) -> bool:
    """Whether every shard of the workload can rest in host memory."""
    dtypes = {p.dtype for chunk in workload.chunks for p in chunk.parameters}
    return all(steps_on_host_shards(workload.optimizer, dtype) for dtype in dtypes)


def by_cpu_shard(schedule: Schedule) -> Schedule:
    """The schedule with every all-gather preceded by a copy of the own shard from host memory."""

    def change(actions: tuple[Unshard, ...]) -> tuple[Unshard, ...]:
        return tuple(replace(a, route="cpu_shard") if a.route == "gpu" else a for a in actions)

    ranks = tuple(
        replace(
            rank,
            start=replace(rank.start, unshard=change(rank.start.unshard)),
            steps=tuple(
                replace(entry, unshard=change(entry.unshard)) if entry.unshard else entry for entry in rank.steps
            ),
        )
        for rank in schedule.ranks
    )
    return replace(schedule, ranks=ranks, groups=tuple(replace(group, algorithm=None) for group in schedule.groups))


def with_host_shards(schedule: Schedule, workload: Workload) -> Schedule:
    """The schedule with the shards in host memory whose groups come from there every time: that costs no time.

    As many as ``limits.pinned_host_bytes`` has room for, in the order of the groups.
    """
    if schedule.zero_stage < 3:
        return schedule
    by_device = {
        action.group
        for rank in schedule.ranks
        for entry in (rank.start, *rank.steps)
        for action in entry.unshard
        if action.route not in FROM_HOST
    }

    def rests(index: int) -> bool:
        group = schedule.groups[index]
        (dtype,) = {
            p.dtype
            for p in workload.chunk(group.pp_rank, group.model_chunk_id).parameters
            if p.name in group.parameters
        }
        return index not in by_device and steps_on_host_shards(workload.optimizer, dtype)

    limit, parallel = schedule.limits.pinned_host_bytes, schedule.parallel
    pinned, groups = pinned_host_bytes(schedule), list(schedule.groups)
    for index, group in enumerate(groups):
        if not rests(index):
            continue
        more = list(pinned)
        for members in parallel.replicas(group.pp_rank, group.ranks):
            for node in parallel.nodes_of(members):
                more[node] += group.bytes // group.ranks
        if limit is None or max(more) <= limit:
            pinned, groups[index] = more, replace(group, shard_rests="host")
    return replace(schedule, groups=tuple(groups))


def check_host_shards(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse a shard in host memory that the run's optimizer cannot update there.

    Raises:
        InputError: naming the group.
    """
    for index, group in enumerate(schedule.groups):
        if group.shard_rests != "host":
            continue
        dtypes = {
            p.dtype
            for p in workload.chunk(group.pp_rank, group.model_chunk_id).parameters
            if p.name in group.parameters
        }
        if not all(steps_on_host_shards(workload.optimizer, dtype) for dtype in dtypes):
            raise InputError(
                f"the optimizer updates {'/'.join(sorted(dtypes))} parameters where it steps, which is the device; "
                "train with --optimizer-cpu-offload",
                file=file,
                field=f"groups[{index}].shard_rests",
                value="host",
            )
