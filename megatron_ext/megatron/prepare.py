"""From a schedule that fits the run to an executor: groups, routes and the compiled program."""

from functools import partial
from time import perf_counter_ns

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.cpubench.allocator import keep_freed_blocks
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.agreement import gather_objects
from megatron_ext.megatron.boundaries import Boundaries, bare
from megatron_ext.megatron.copies import Copies
from megatron_ext.megatron.delayed_steps import delay_steps
from megatron_ext.megatron.describe_model import describe_chunk
from megatron_ext.megatron.recompute import blocks_of
from megatron_ext.megatron.resting_storages import resting_storages
from megatron_ext.megatron.shards import (
    HeldGradient,
    hold_gradients,
    hold_shards,
    offloaded_shards,
    refuse_state_of_freed,
)
from megatron_ext.megatron.states_on_device import leave_step_out
from megatron_ext.megatron.states_on_drive import put_states_on_drive
from megatron_ext.megatron.step_beside_backward import step_beside_backward
from megatron_ext.megatron.steps_through_slots import step_through_slots
from megatron_ext.runtime import debug, symmetric
from megatron_ext.runtime.buffered_gather import BufferedRoute
from megatron_ext.runtime.census import Census
from megatron_ext.runtime.cpu_shard import CpuShardRoute, make_data_group
from megatron_ext.runtime.delayed_update import DelayedUpdate
from megatron_ext.runtime.device import device_of, has_cuda
from megatron_ext.runtime.drive_states import DriveStates
from megatron_ext.runtime.early_steps import EarlySteps
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import Clock, FreedGroup, Group, Residency
from megatron_ext.runtime.hierarchical import HierarchicalGather
from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.runtime.program import compile_program
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.routes import GpuRoute, Route
from megatron_ext.runtime.slot_steps import StepSlots
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC


def prepare(
    schedule: Schedule,
    ddps: list,
    bucket_groups: dict,
    optimizers: list,
    faults: Faults,
    recorder: Recorder | None,
    nvme_path=None,
    delay: tuple[int, int] | None = None,
) -> Executor:
    """Make everything that training by ``schedule`` needs on this rank; collective.

    Args:
        ddps, bucket_groups: model chunks laid out by :func:`buckets.lay_out`, and their bucket groups by group index.
        optimizers: Megatron's DistributedOptimizer objects.
        faults: delays and negative controls.
        recorder: where to record issues and waits, and where it records every iteration also links; or None.
        nvme_path: directory for NVMe copies and optimizer states, where the schedule has any.
        delay: as :class:`DelayedUpdate` takes ``begun`` and ``after``; None: no update is delayed.

    Raises:
        InputError: copies cannot be made; not on every rank of the run.
    """
    keep_host_blocks()
    process_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    pp_rank, clock, residency = parallel_state.get_pipeline_model_parallel_rank(), Clock(), Residency()
    groups = make_groups(schedule, bucket_groups, process_group, residency)
    buckets = [(bucket_groups[index].buckets[0], group) for index, group in groups.items()]
    _hold_shards_only(schedule, ddps, groups, optimizers, buckets)
    links = recorder if recorder and recorder.iterations is None else None
    gpu, routes, order, buffered = _collective_routes(schedule, groups, process_group, faults, links)
    checks = _checks(schedule, pp_rank, process_group, order)
    copies = Copies(
        schedule, groups, _offloaded(schedule, optimizers, buckets), process_group, clock, faults, links, nvme_path
    )
    routes.update(copies.routes)
    how = dict(published=copies.publisher and copies.publisher.wait, faults=faults, recorder=links)
    leave_step_out(optimizers, buckets, faults.skip_step)
    slots = _slots(schedule, optimizers, buckets, nvme_path, links, delay is not None)
    early, delayed, beside = _beside_training(schedule, optimizers, bucket_groups, groups, slots, delay, **how)
    boundaries = _boundaries(schedule, ddps, pp_rank)
    reducer = _reducer(schedule, bucket_groups, optimizers, process_group, faults, order, early)
    resting = partial(resting_storages, groups, ddps, optimizers, copies, slots, buffered, reducer, beside)
    steps = (groups, routes, clock, boundaries, recorder, faults.skip_group, checks is not None, reducer)
    program = compile_program(schedule, schedule.ranks[pp_rank], *steps)
    executor = Executor(
        *(program, groups, clock, residency, gpu.issue),
        recorder=recorder,
        checks=checks,
        publisher=copies.publisher,
        pool=copies.pool,
        drop_staged=copies.drop_staged,
        census=Census(residency, _parameters(ddps), resting, reducer),
        reducer=reducer,
        early=early,
        delayed=delayed,
    )
    parts = (*slots, *buffered, reducer, early, delayed)
    executor.on_close(boundaries.close, *copies.closing, *(part.close for part in parts if part))
    return executor


def _offloaded(schedule: Schedule, optimizers: list, buckets: list) -> dict:
    """The host optimizer's copies of shards to publish from, by group index."""
    copies = offloaded_shards(optimizers, buckets) if schedule.publish else {}
    # Where states rest elsewhere there is no such copy in host memory: the group is published from its shard.
    return {index: copy for index, copy in copies.items() if schedule.groups[index].states_rest is None}


def _beside_training(
    schedule: Schedule,
    optimizers: list,
    bucket_groups: dict,
    groups: dict[int, Group],
    slots: list[DriveStates | StepSlots],
    delay,
    **how,
) -> tuple[EarlySteps | None, DelayedUpdate | None, dict[str, list]]:
    """Steps of this rank beside the backward and beside the next iteration, None where there are none, and what they
    keep in host memory, by kind."""
    if not groups:
        return None, None, {}
    how |= dict(device=device_of(next(iter(groups.values())).whole), rank=dist.get_rank())
    if delay is not None:
        delayed = delay_steps(optimizers, *delay, **how)
        return None, delayed, {"next_parameters": [staging for staging, _ in delayed.staged]}
    if schedule.rollback_bytes is None:
        return None, None, {}
    early = step_beside_backward(schedule, optimizers, bucket_groups, groups, slots, **how)
    return early, None, {"previous_states": [early.memory]}


def _slots(
    schedule: Schedule, optimizers: list, buckets: list, nvme_path, recorder, delayed: bool
) -> list[DriveStates | StepSlots]:
    """What the host's optimizers of this rank step through: slots of states on the drive, and of gradients."""
    if not buckets:
        return []
    device, made = device_of(buckets[0][1].whole), []
    if schedule.state_slots is not None:
        made += put_states_on_drive(schedule, optimizers, buckets, nvme_path, device, recorder, delayed)
    in_memory = [(bucket, group) for bucket, group in buckets if schedule.groups[group.index].states_rest is None]
    if schedule.step_slots is not None and in_memory:
        made.append(step_through_slots(schedule, optimizers, in_memory, device))
    return made


def _checks(schedule: Schedule, pp_rank: int, process_group, order: debug.IssueOrder | None) -> debug.Checks | None:
    if order is None:
        return None
    exchange = partial(gather_objects, process_group=process_group)
    return debug.Checks(device_peaks(schedule)[pp_rank], order, exchange)


def _parameters(ddps: list) -> list:
    return [parameter for ddp in ddps for parameter in ddp.module.parameters()]


def keep_host_blocks() -> None:
    """Let the process keep freed blocks where parameters live in host memory.

    On CUDA the caching allocator does so, and the host's own allocator is the user's.
    """
    if not has_cuda():
        keep_freed_blocks()


def _hold_shards_only(
    schedule: Schedule, ddps: list, groups: dict[int, Group], optimizers: list, buckets: list
) -> None:
    """At zero stage 3 the optimizers work on shards, and the state of a freed chunk is refused."""
    if schedule.zero_stage != 3:
        return
    hold_shards(optimizers, buckets)
    for chunk_id, ddp in enumerate(ddps):
        freed = [group for index, group in groups.items() if schedule.groups[index].model_chunk_id == chunk_id]
        refuse_state_of_freed(bare(ddp), freed)


def _collective_routes(
    schedule: Schedule, groups: dict[int, Group], process_group, faults: Faults, recorder: Recorder | None
) -> tuple[Route, dict[str, Route], debug.IssueOrder | None, list]:
    """The plain all-gather, the routes by name as they are recorded and counted, the count or None, and the routes that
    go through buffers."""
    buffers: dict[str, Route | None] = {
        HIERARCHICAL: _hierarchical(schedule, groups, process_group, recorder),
        SYMMETRIC: _symmetric(schedule, groups, process_group, recorder),
        "cpu_shard": _cpu_shard(schedule, groups, process_group, faults, recorder),
    }
    buffered = {name: route for name, route in buffers.items() if route}
    gpu: Route = GpuRoute(process_group)
    routes: dict[str, Route] = {"gpu": gpu if recorder is None else _RecordedGather(gpu, recorder)}
    routes |= buffered
    if not debug.wanted():
        return gpu, routes, None, list(buffered.values())
    order = debug.IssueOrder()
    counted: dict[str, Route] = {name: debug.OrderedRoute(route, order) for name, route in routes.items()}
    return debug.OrderedRoute(gpu, order), counted, order, list(buffered.values())


def _hierarchical(schedule: Schedule, groups: dict[int, Group], process_group, recorder) -> BufferedRoute | None:
    """The route of this rank's groups that are gathered in two legs; None where it has none.

    Process groups are made by all ranks together as soon as any rank has such a group.
    """
    wanted = {index for index, group in enumerate(schedule.groups) if group.algorithm == HIERARCHICAL}
    if not wanted:
        return None
    node_groups = make_node_groups(schedule.parallel, dist.get_backend(process_group))
    own = [group for index, group in groups.items() if index in wanted]
    assert node_groups is not None  # validation lets such groups pass only where nodes make two legs
    return BufferedRoute(HierarchicalGather(node_groups, device_of(own[0].whole)), recorder) if own else None


def _symmetric(schedule: Schedule, groups: dict[int, Group], process_group, recorder) -> BufferedRoute | None:
    """The route of this rank's groups that copy engines gather; None where it has none.

    Process groups are made as :func:`_hierarchical` makes them. Raises InputError where there is no such thing.
    """
    wanted = {index for index, group in enumerate(schedule.groups) if group.algorithm == SYMMETRIC}
    if not wanted:
        return None
    device, how = next((device_of(group.whole) for group in groups.values()), None), {}
    if device is not None:  # or this rank holds nothing, and gathers nothing
        why = symmetric.missing(device.kind, dist.get_world_size(process_group), 1)
        if why is not None:
            raise InputError(f"cannot be done here: {why}", field=f"groups[{min(wanted)}].algorithm", value=SYMMETRIC)
        how = symmetric.without_thread_blocks(device.device)
    data = make_data_group(schedule.parallel, dist.get_backend(process_group), **how)
    largest: dict = {}
    for whole in (group.whole for index, group in groups.items() if index in wanted):
        largest[whole.dtype] = max(largest.get(whole.dtype, 0), whole.numel())
    return BufferedRoute(symmetric.SymmetricGather(data, device, largest), recorder) if largest else None


def _cpu_shard(
    schedule: Schedule, groups: dict[int, Group], process_group, faults: Faults, recorder: Recorder | None
) -> CpuShardRoute | None:
    """The route of this rank's groups that come by ``cpu_shard``; None where no rank has such a group.

    Process groups are made by all ranks together as soon as any rank has such a group.
    """
    if not any(
        action.route == "cpu_shard"
        for rank in schedule.ranks
        for entry in (rank.start, *rank.steps)
        for action in entry.unshard
    ):
        return None
    own = make_data_group(schedule.parallel, dist.get_backend(process_group))
    return CpuShardRoute(own, device_of(next(iter(groups.values())).whole), faults, recorder) if groups else None


def _reducer(
    schedule: Schedule,
    bucket_groups: dict,
    optimizers: list,
    process_group,
    faults: Faults,
    order: debug.IssueOrder | None,
    early: EarlySteps | None,
) -> Reducer | None:
    """Of this rank's gradients that come and go, whose shards the optimizers then read; None where all stay whole."""
    gradients = {
        index: bucket_group.gradient
        for index, bucket_group in sorted(bucket_groups.items())
        if bucket_group.gradient is not None
    }
    if not gradients:
        return None
    on_host = [index for index in gradients if schedule.groups[index].gradients == "host"]
    held = [
        HeldGradient(bucket_groups[index].params, one.shard, one.shard_start, index in on_host, one.whole.device)
        for index, one in gradients.items()
    ]
    hold_gradients(optimizers, held)
    device = device_of(next(iter(gradients.values())).whole)
    reducer = Reducer(gradients, on_host, device, faults, dist.get_rank(process_group), order)
    reducer.complete = early.reduced if early is not None else None
    return reducer


def make_groups(schedule: Schedule, bucket_groups: dict, process_group, residency: Residency) -> dict[int, Group]:
    """This rank's groups by index, over the storage of their buckets."""
    dp_rank, dp_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    groups = {}
    for index, bucket_group in sorted(bucket_groups.items()):
        (bucket,) = bucket_group.buckets
        name = f"chunk {schedule.groups[index].model_chunk_id}"
        if schedule.zero_stage == 3:
            on_host = schedule.groups[index].shard_rests == "host"
            groups[index] = FreedGroup(index, name, bucket.param_data, dp_rank, dp_size, residency, on_host)
        else:
            groups[index] = Group(index, name, bucket.param_data, dp_rank, dp_size)
            residency.add(groups[index].bytes)
        assert groups[index].bytes == schedule.groups[index].bytes
    return groups


def _boundaries(schedule: Schedule, ddps: list, pp_rank: int) -> Boundaries:
    """Where actions can run between the layers of this rank's chunks."""
    blocks = [blocks_of(describe_chunk(ddp, pp_rank, index), ddp.config) for index, ddp in enumerate(ddps)]
    return Boundaries(ddps, uses_of_groups(schedule, ddps, pp_rank), blocks)


def uses_of_groups(schedule: Schedule, ddps: list, pp_rank: int) -> dict[int, tuple[int, int]]:
    """First and last layer of its chunk that use each of this rank's groups."""
    found = {}
    for chunk_id, ddp in enumerate(ddps):
        uses = {p.name: p.uses for p in describe_chunk(ddp, pp_rank, chunk_id).parameters}
        for index, group in enumerate(schedule.groups):
            if (group.pp_rank, group.model_chunk_id) == (pp_rank, chunk_id):
                layers = [layer for name in group.parameters for layer in uses[name]]
                found[index] = (min(layers), max(layers))
    return found


class _RecordedGather:
    """The gpu route with its link's busy time recorded."""

    def __init__(self, route, recorder: Recorder):
        self.route, self.recorder = route, recorder

    def issue(self, group):
        start = perf_counter_ns()
        work = self.route.issue(group)
        name = f"unshard {group.index}"
        if group.whole.device.type == "cpu":  # on CUDA a work's future completes when it is queued
            work.get_future().add_done_callback(lambda _: self.recorder.add("gpu", name, start, perf_counter_ns()))
        return work
