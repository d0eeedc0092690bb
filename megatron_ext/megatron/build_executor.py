"""From a schedule that fits the run to an executor: groups, routes, parts and the compiled program."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.cpubench.allocator import keep_freed_blocks
from megatron_ext.megatron.boundaries import Boundaries, bare
from megatron_ext.megatron.chunk_state import guard_state, save_copies
from megatron_ext.megatron.collective_routes import CollectiveRoutes, collective_routes
from megatron_ext.megatron.copies import Copies
from megatron_ext.megatron.late_memory import make_gradients
from megatron_ext.megatron.own_rank import OwnRank
from megatron_ext.megatron.own_step_bytes import count_own_steps
from megatron_ext.megatron.recompute import blocks_of
from megatron_ext.megatron.resting_storages import resting_storages
from megatron_ext.megatron.run_summary import say
from megatron_ext.megatron.scheduled_host_step import HostStep
from megatron_ext.megatron.shards import HeldGradient, hold_gradients, hold_shards, steps_on_the_host
from megatron_ext.runtime import block_pages, debug, host_threads
from megatron_ext.runtime.census import Census
from megatron_ext.runtime.device import has_cuda
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.in_turn import InTurn
from megatron_ext.runtime.memory_pool import MemoryPool, rehearse
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.program import Program, compile_program, place_actions
from megatron_ext.schedule import memory_bill
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.schedule.group_facts import uses_of_groups
from megatron_ext.schedule.user_defined_schedule import Schedule


def build_executor(own: OwnRank) -> Executor:
    """Make everything that training by the schedules of ``own`` needs on this rank, behind :func:`ready_the_host`;
    collective.

    Raises:
        InputError: copies cannot be made; not on every rank of the run.
    """
    shards = hold_shards(own.optimizers, own.buckets, own.links) if own.schedule.zero_stage == 3 else None
    routes = collective_routes(own.schedules, own.groups, own.process_groups, own.links)
    copies = Copies(own)
    host_step = _host_step(own, copies)
    reducer = _reducer(own, routes.order, host_step)
    steps = () if host_step is None else host_step.parts
    census = _census(own, routes, copies, host_step, reducer, [] if shards is None else [shards.buffer])
    parts = [part for part in (reducer, shards, copies.publisher, *steps, census) if part is not None]
    boundaries = _boundaries(own)
    turn = any(part is not None for part in (copies.publisher, host_step, reducer))
    compiled = _compiler(own, routes, copies, boundaries, reducer, turn)
    executor = Executor(
        compiled(own.schedule.parallel.num_microbatches),
        own.groups,
        own.clock,
        own.residency,
        routes.gather.issue,
        own.issuer,
        parts,
        recorder=own.recorder,
        checks=_checks(own, routes.order),
        pool=copies.pool,
        drop_staged=copies.drop_staged,
        memory=_memory_pool(own, reducer),
        in_turn=_in_turn(own, routes, boundaries),
        program_for=compiled,
    )
    _say_once(executor.fill_memory(partial(_rehearse, own, boundaries, reducer)))
    _close_at_the_end(executor, own, boundaries, copies, routes, host_step)
    _guard_chunks(own, executor)
    return executor


# The host.


def ready_the_host(own: OwnRank) -> None:
    """Keep its freed blocks, and use all cores of its processors where the schedule or an optimizer needs them."""
    if not has_cuda():  # on CUDA the caching allocator keeps blocks, and the host's own allocator is the user's
        keep_freed_blocks()
        return
    numa_node = host_threads.numa_node(torch.device("cuda", torch.cuda.current_device()))
    # A launcher may have given each rank processors of its own, as srun does.
    nodes = gather_objects(beside := (dist.get_rank() // own.schedule.parallel.node_size, os.sched_getaffinity(0)))
    adds = any(group.gradients == "host" for group in own.schedule.groups)
    if adds or _steps_on_host(own.schedule) or any(map(steps_on_the_host, own.optimizers)):
        for line in host_threads.use(nodes.count(beside)):
            _say_once(line)
    with_memory = block_pages.memory_nodes()
    if numa_node is not None and with_memory and numa_node not in with_memory:
        say(
            f"rank {dist.get_rank()}: NUMA node {numa_node}, next to its GPU, has no memory that this process may use; "
            f"all its host memory is on nodes {with_memory} and crosses the link between sockets"
        )


def _say_once(line: str | None) -> None:
    if line is not None and dist.get_rank() == 0:
        say(line)


# Parts.


def _steps_on_host(schedule: Schedule) -> bool:
    """Whether the schedule says how the host's optimizer steps."""
    fields = schedule.rollback_bytes, schedule.step_slots, schedule.state_slots
    return any(field is not None for field in fields)


def _host_step(own: OwnRank, copies: Copies) -> HostStep | None:
    """None where Megatron makes the host's step alone, or there is none."""
    host_step = None
    if own.groups and (own.delay is not None or _steps_on_host(own.schedule)):
        host_step = HostStep(own, copies.publisher)
        if any(unit.stay for unit in host_step.units):
            _say_once(
                "the host steps by torch's fused AdamW on joined parameters: the bits of Megatron's own host step"
            )
    units = [] if host_step is None else [unit.optimizer for unit in host_step.units]
    make_gradients(own.optimizers, units)
    if own.links.counts:
        count_own_steps(own, own.links, units)
    return host_step


def _reducer(own: OwnRank, order: debug.IssueOrder | None, host_step: HostStep | None) -> Reducer | None:
    """Of this rank's gradients that come and go, whose shards the optimizers then read; None where all stay whole."""
    gradients = {index: one.gradient for index, one in sorted(own.bucket_groups.items()) if one.gradient is not None}
    if not gradients:
        return None
    on_host = [index for index in gradients if own.schedule.groups[index].gradients == "host"]
    held = [
        HeldGradient(own.bucket_groups[index].params, one.shard, one.shard_start, index in on_host, one.whole.device)
        for index, one in gradients.items()
    ]
    hold_gradients(own.optimizers, held, own.links)
    reducer = Reducer(gradients, on_host, own.device, own.issuer, order, own.links)
    reducer.complete = host_step.early.reduced if host_step is not None and host_step.early is not None else None
    return reducer


def _census(
    own: OwnRank,
    routes: CollectiveRoutes,
    copies: Copies,
    host_step: HostStep | None,
    reducer: Reducer | None,
    buffers: list[torch.Tensor],
) -> Census:
    parameters = [parameter for ddp in own.ddps for parameter in ddp.module.parameters()]
    resting = partial(resting_storages, own, copies, host_step, routes.buffered, reducer, buffers)
    return Census(own.residency, parameters, resting, reducer)


def _checks(own: OwnRank, order: debug.IssueOrder | None) -> debug.Checks | None:
    if order is None:
        return None
    exchange = partial(gather_objects, process_group=own.process_group)
    peaks = {number: device_peaks(one)[own.pp_rank] for number, one in own.schedules.items()}
    return debug.Checks(peaks, order, exchange)


def _memory_pool(own: OwnRank, reducer: Reducer | None) -> MemoryPool | None:
    """The pool that whole parameters and gradients of this rank come from; None where it has no groups."""
    if own.device is None:
        return None
    pool = MemoryPool(own.device)
    for held in (*own.groups.values(), *(reducer.gradients.values() if reducer is not None else ())):
        pool.serve(held)
    return pool


def _in_turn(own: OwnRank, routes: CollectiveRoutes, boundaries: Boundaries) -> InTurn | None:
    """None where all groups may be whole at a time."""
    schedule = own.schedule
    if not memory_bill.short_of_whole(schedule, own.pp_rank):
        return None
    chunks = {index: schedule.groups[index].model_chunk_id for index in own.groups}
    most = device_peaks(schedule)[own.pp_rank]
    return InTurn(own.groups, own.clock, routes.gather.issue, boundaries, chunks, most)


# The program.


def _boundaries(own: OwnRank) -> Boundaries:
    """Where actions can run between the layers of this rank's chunks."""
    uses = uses_of_groups(own.schedule.groups, own.workload)
    blocks = [blocks_of(own.workload.chunk(own.pp_rank, n), ddp.config) for n, ddp in enumerate(own.ddps)]
    return Boundaries(own.ddps, {index: uses[index] for index in own.groups}, blocks)


def _compiler(
    own: OwnRank, routes: CollectiveRoutes, copies: Copies, boundaries: Boundaries, reducer: Reducer | None, turn: bool
) -> Callable[[int], Program]:
    """Makes the program for a number of micro-batches; ``turn``: it lets the issuer issue what threads have ended."""
    by_name: dict[str, Any] = routes.by_name | copies.routes

    def compiled(num_microbatches: int) -> Program:
        schedule = schedule_for(own.schedules, num_microbatches)
        rank, check_uses = schedule.ranks[own.pp_rank], routes.order is not None
        placed = place_actions(
            schedule, rank, own.groups, by_name, own.clock, boundaries, own.recorder, check_uses, reducer
        )
        return compile_program(placed, boundaries, own.issuer.turn if turn else None)

    return compiled


def schedule_for(schedules: dict[int, Schedule], num_microbatches: int) -> Schedule:
    """Raises ScheduleError where there is none."""
    if num_microbatches not in schedules:
        there = ", ".join(map(str, schedules))
        raise ScheduleError(f"the iteration has {num_microbatches} micro-batches, the schedules are for {there}")
    return schedules[num_microbatches]


def _rehearse(own: OwnRank, boundaries: Boundaries, reducer: Reducer | None) -> None:
    for schedule in own.schedules.values():
        rehearse(schedule, schedule.ranks[own.pp_rank], own.groups, own.clock, boundaries, reducer)


# The end.


def _close_at_the_end(
    executor: Executor,
    own: OwnRank,
    boundaries: Boundaries,
    copies: Copies,
    routes: CollectiveRoutes,
    host_step: HostStep | None,
) -> None:
    """What the end of training closes, the last one first: page-locked memory goes when nothing uses it any more."""
    if own.device is not None:
        executor.on_close(own.device.close)
    executor.on_close(boundaries.close, *copies.closing, *(one.close for one in routes.buffered))
    if host_step is not None:
        executor.on_close(host_step.close)


def _guard_chunks(own: OwnRank, executor: Executor) -> None:
    """At zero stage 3 the state of a freed chunk is refused, or given in turn."""
    for chunk_id, ddp in enumerate(own.ddps if own.schedule.zero_stage == 3 else ()):
        freed = [g for index, g in own.groups.items() if own.schedule.groups[index].model_chunk_id == chunk_id]
        guard_state(bare(ddp), freed, None if executor.in_turn is None else executor)
    if executor.in_turn is not None:
        executor.on_close(save_copies(executor))
