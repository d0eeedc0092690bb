"""From a schedule that fits the run to an executor: groups, routes and the compiled program."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.cpubench.allocator import keep_freed_blocks
from megatron_ext.megatron.agreement import gather_objects
from megatron_ext.megatron.boundaries import Boundaries, bare
from megatron_ext.megatron.buckets import buffers_of
from megatron_ext.megatron.chunk_state import guard_state, save_copies
from megatron_ext.megatron.collective_routes import collective_routes
from megatron_ext.megatron.copies import Copies
from megatron_ext.megatron.describe_model import describe_chunk
from megatron_ext.megatron.late_model import LateModel
from megatron_ext.megatron.own_step_bytes import count_own_steps
from megatron_ext.megatron.recompute import blocks_of
from megatron_ext.megatron.resting_storages import resting_storages
from megatron_ext.megatron.run_summary import say
from megatron_ext.megatron.scheduled_host_step import HostStep
from megatron_ext.megatron.shards import HeldGradient, hold_gradients, hold_shards, offloaded_shards, steps_on_the_host
from megatron_ext.runtime import block_pages, debug, host_threads
from megatron_ext.runtime.census import Census
from megatron_ext.runtime.device import device_of, has_cuda
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import Clock, FreedGroup, Group, Residency, ScheduleError
from megatron_ext.runtime.in_turn import InTurn
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.memory_pool import MemoryPool, rehearse
from megatron_ext.runtime.program import Program, compile_program
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule import memory_bill
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.schedule.user_defined_schedule import Schedule


def prepare(
    schedules: dict[int, Schedule],
    ddps: list,
    bucket_groups: dict,
    optimizers: list,
    recorder: Recorder | None,
    nvme_path=None,
    delay: tuple[int, int] | None = None,
    late: LateModel | None = None,
) -> Executor:
    """Make everything that training by ``schedules`` (by number of micro-batches) needs on this rank; collective.

    Args:
        ddps, bucket_groups: model chunks laid out by :func:`buckets.lay_out`, and their bucket groups by group index.
        optimizers: Megatron's DistributedOptimizer objects.
        recorder: where to record issues and waits, and where it records every iteration also links; or None.
        nvme_path: directory for NVMe copies and optimizer states, where the schedule has any.
        delay, late: what :class:`DelayedUpdate` takes as ``begun`` and ``after``; a model that was built late; or None.

    Raises:
        InputError: copies cannot be made; not on every rank of the run.
    """
    schedule = next(reversed(schedules.values()))
    _ready_the_host(schedule, optimizers)
    process_group = (process_groups := process_groups_of(ddps))[schedule.parallel.dp]
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    clock, residency, issuer = Clock(), Residency() if late is None else late.residency, Issuer()
    groups = make_groups(schedule, bucket_groups, process_groups, residency, late)
    buckets: list = [(bucket_groups[index].buckets[0], group) for index, group in groups.items()]
    links = recorder if recorder and recorder.iterations is None else None
    host_shards = hold_shards(optimizers, buckets, links) if schedule.zero_stage == 3 else None
    routes = collective_routes(schedules, groups, process_groups, links)
    copied = (groups, _offloaded(schedule, optimizers, buckets), process_groups, issuer, clock, links)
    copies = Copies(schedule, *copied, nvme_path)
    how = (copies.publisher, issuer, links, nvme_path, delay)
    host_step = _host_step(schedule, optimizers, bucket_groups, groups, buckets, links, *how)
    boundaries = _boundaries(schedule, ddps, pp_rank)
    of_run = (issuer, routes.order, host_step, links)
    reducer = _reducer(schedule, bucket_groups, optimizers, *of_run)
    kept = (routes.buffered, reducer, [] if host_shards is None else [host_shards.buffer])
    resting = partial(resting_storages, groups, ddps, optimizers, copies, host_step, *kept)
    census = Census(residency, _parameters(ddps), resting, reducer)
    turn = issuer.turn if any((copies.publisher, host_step, reducer)) else None
    of_rank = (schedules, pp_rank, groups, routes.by_name | copies.routes, clock, boundaries, recorder)
    compiled = partial(_compiled, *of_rank, routes.order is not None, reducer, turn)
    executor = Executor(
        *(compiled(schedule.parallel.num_microbatches), groups, clock, residency, routes.gather.issue, issuer),
        [*_parts(reducer, host_shards, copies.publisher, host_step), census],
        recorder=recorder,
        checks=_checks(schedules, pp_rank, process_group, routes.order),
        pool=copies.pool,
        drop_staged=copies.drop_staged,
        memory=_memory_pool(groups, reducer),
        in_turn=_in_turn(schedule, pp_rank, groups, clock, routes.gather.issue, boundaries),
        program_for=compiled,
    )
    _say_once(executor.fill_memory(partial(_rehearse_all, schedules, pp_rank, groups, clock, boundaries, reducer)))
    return _closing_at_the_end(executor, schedule, ddps, boundaries, copies, routes.buffered, host_step)


def _compiled(schedules: dict[int, Schedule], pp_rank: int, *how_and_number) -> Program:
    """The program for a number of micro-batches, the last argument. Raises ScheduleError where no schedule is for
    it."""
    *how, number = how_and_number
    schedule = schedule_for(schedules, number)
    return compile_program(schedule, schedule.ranks[pp_rank], *how)


def schedule_for(schedules: dict[int, Schedule], num_microbatches: int) -> Schedule:
    """Raises ScheduleError where there is none."""
    if num_microbatches not in schedules:
        there = ", ".join(map(str, schedules))
        raise ScheduleError(f"the iteration has {num_microbatches} micro-batches, the schedules are for {there}")
    return schedules[num_microbatches]


def _rehearse_all(schedules: dict[int, Schedule], pp_rank: int, *of_iteration) -> None:
    for schedule in schedules.values():
        rehearse(schedule, schedule.ranks[pp_rank], *of_iteration)


def _host_step(
    schedule: Schedule, optimizers: list, bucket_groups: dict, groups: dict, buckets: list, recorder, *how
) -> HostStep | None:
    """None where Megatron makes the host's step alone, or there is none."""
    stepped = groups and (how[-1] is not None or _steps_on_host(schedule))
    host_step = HostStep(schedule, optimizers, bucket_groups, groups, *how) if stepped else None
    if recorder is not None:
        units = [] if host_step is None else [unit.optimizer for unit in host_step.units]
        count_own_steps(schedule, optimizers, buckets, recorder, units)
    return host_step


def _parts(reducer, host_shards, publisher, host_step: HostStep | None) -> list:
    steps = host_step.parts if host_step is not None else ()
    if host_step is not None and any(unit.stay for unit in host_step.units):
        _say_once("the host steps by torch's fused AdamW on joined parameters: the bits of Megatron's own host step")
    return [part for part in (reducer, host_shards, publisher, *steps) if part is not None]


def _closing_at_the_end(
    executor: Executor, schedule: Schedule, ddps: list, boundaries: Boundaries, copies: Copies, buffered, host_step
) -> Executor:
    """What the end of training closes, the last one first: page-locked memory goes when nothing uses it any more."""
    executor.on_close(*(device_of(one.whole).close for one in list(executor.groups.values())[:1]))
    executor.on_close(boundaries.close, *copies.closing, *(one.close for one in buffered))
    if host_step is not None:
        executor.on_close(host_step.close)
    _guard_chunks(schedule, ddps, executor)
    return executor


def _in_turn(schedule: Schedule, pp_rank: int, groups: dict, clock, gather, boundaries) -> InTurn | None:
    """None where all groups may be whole at a time."""
    if not memory_bill.short_of_whole(schedule, pp_rank):
        return None
    chunks = {index: schedule.groups[index].model_chunk_id for index in groups}
    return InTurn(groups, clock, gather, boundaries, chunks, device_peaks(schedule)[pp_rank])


def _say_once(line: str | None) -> None:
    if line is not None and dist.get_rank() == 0:
        say(line)


def _ready_the_host(schedule: Schedule, optimizers: list) -> None:
    """Keep its freed blocks, and use all cores of its processors where the schedule or an optimizer needs them."""
    keep_host_blocks()
    if not has_cuda():
        return
    numa_node, lines = host_threads.numa_node(torch.device("cuda", torch.cuda.current_device())), []
    nodes = gather_objects(beside := (dist.get_rank() // schedule.parallel.node_size, numa_node))
    if schedule_needs_host(schedule) or any(map(steps_on_the_host, optimizers)):
        lines += host_threads.use(nodes.count(beside))
    for line in lines:
        _say_once(line)
    with_memory = block_pages.memory_nodes()
    if numa_node is not None and with_memory and numa_node not in with_memory:
        say(
            f"rank {dist.get_rank()}: NUMA node {numa_node}, beside its GPU, has no memory that this process may use; "
            f"all its host memory is on nodes {with_memory} and crosses the link between sockets"
        )


def _memory_pool(groups: dict[int, Group], reducer: Reducer | None) -> MemoryPool | None:
    """The pool that whole parameters and gradients of this rank come from; None where it has no groups."""
    if not groups:
        return None
    pool = MemoryPool(device_of(next(iter(groups.values())).whole))
    for held in (*groups.values(), *(reducer.gradients.values() if reducer is not None else ())):
        pool.serve(held)
    return pool


def schedule_needs_host(schedule: Schedule) -> bool:
    """Whether the schedule lets the host's processors do anything beside copies."""
    return _steps_on_host(schedule) or any(group.gradients == "host" for group in schedule.groups)


def _steps_on_host(schedule: Schedule) -> bool:
    """Whether the schedule says how the host's optimizer steps."""
    fields = schedule.rollback_bytes, schedule.step_slots, schedule.state_slots
    return any(field is not None for field in fields)


def _offloaded(schedule: Schedule, optimizers: list, buckets: list) -> dict:
    """The host optimizer's copies of shards to publish from, by group index."""
    copies = offloaded_shards(optimizers, buckets) if schedule.publish else {}
    # Where states rest elsewhere there is no such copy in host memory: the group is published from its shard.
    return {index: copy for index, copy in copies.items() if schedule.groups[index].states_rest is None}


def _checks(
    schedules: dict[int, Schedule], pp_rank: int, process_group, order: debug.IssueOrder | None
) -> debug.Checks | None:
    if order is None:
        return None
    exchange = partial(gather_objects, process_group=process_group)
    return debug.Checks({number: device_peaks(one)[pp_rank] for number, one in schedules.items()}, order, exchange)


def _parameters(ddps: list) -> list:
    return [parameter for ddp in ddps for parameter in ddp.module.parameters()]


def keep_host_blocks() -> None:
    """Let the process keep freed blocks where parameters live in host memory.

    On CUDA the caching allocator does so, and the host's own allocator is the user's.
    """
    if not has_cuda():
        keep_freed_blocks()


def _guard_chunks(schedule: Schedule, ddps: list, executor: Executor) -> None:
    """At zero stage 3 the state of a freed chunk is refused, or given in turn."""
    for chunk_id, ddp in enumerate(ddps if schedule.zero_stage == 3 else ()):
        freed = [group for index, group in executor.groups.items() if schedule.groups[index].model_chunk_id == chunk_id]
        guard_state(bare(ddp), freed, None if executor.in_turn is None else executor)
    if executor.in_turn is not None:
        executor.on_close(save_copies(executor))


def _reducer(
    schedule: Schedule,
    bucket_groups: dict,
    optimizers: list,
    issuer: Issuer,
    order: debug.IssueOrder | None,
    host_step: HostStep | None,
    recorder: Recorder | None,
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
    hold_gradients(optimizers, held, recorder)
    device = device_of(next(iter(gradients.values())).whole)
    reducer = Reducer(gradients, on_host, device, issuer, order, recorder)
    reducer.complete = host_step.early.reduced if host_step is not None and host_step.early is not None else None
    return reducer


def process_groups_of(ddps: list) -> dict[int, dist.ProcessGroup]:
    """Megatron's process groups that shards are in, by their number of ranks: the data-parallel one, and that of
    experts."""
    found = {buffer.data_parallel_world_size: buffer.data_parallel_group for ddp in ddps for buffer in buffers_of(ddp)}
    dense: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return found | {dist.get_world_size(dense): dense}


def make_groups(
    schedule: Schedule, bucket_groups: dict, process_groups: dict, residency: Residency, late: LateModel | None = None
) -> dict[int, Group]:
    """This rank's groups by index, over the storage of their buckets; ``late`` has them where it is not None."""
    if late is not None:
        return dict(sorted(late.groups.items()))
    groups = {}
    for index, bucket_group in sorted(bucket_groups.items()):
        (bucket,), dp_size = bucket_group.buckets, schedule.groups[index].ranks
        dp_rank = dist.get_rank(process_groups[dp_size])
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
