"""Build an executor from a schedule that fits the run: groups, routes, parts and the compiled program."""

import os
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.cpubench.allocator import keep_freed_blocks
from megatron_ext.megatron.boundaries import Boundaries, bare
from megatron_ext.megatron.chunk_state import guard_state, save_copies
from megatron_ext.megatron.copies import Copies
from megatron_ext.megatron.late_memory import make_gradients
from megatron_ext.megatron.late_sums import add_up_shards
from megatron_ext.megatron.own_rank import OwnRank
from megatron_ext.megatron.own_step_bytes import count_own_steps
from megatron_ext.megatron.recompute import blocks_of
from megatron_ext.megatron.resting_storages import resting_storages
from megatron_ext.megatron.run_summary import say
from megatron_ext.megatron.scheduled_host_step import HostStep
from megatron_ext.megatron.shards import HeldGradient, hold_gradients, hold_shards, steps_on_the_host
from megatron_ext.runtime import block_pages, debug, host_threads
from megatron_ext.runtime.census import Census, Resting
from megatron_ext.runtime.device import has_cuda
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.in_turn import InTurn
from megatron_ext.runtime.memory_pool import MemoryPool, rehearse
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.program import Program, compile_program, place_actions
from megatron_ext.runtime.routes.make_routes import collective_routes
from megatron_ext.schedule import memory_bill
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.schedule.group_facts import uses_of_groups
from megatron_ext.schedule.user_defined_schedule import Schedule


def build_executor(own: OwnRank) -> Executor:
    """Make everything that training by the schedules of ``own`` needs on this rank. Call after :func:`ready_the_host`;
    collective.

    Raises:
        InputError: copies cannot be made. It may be raised on some ranks only.
    """
    return _Builder(own).executor()


# The host.


def ready_the_host(own: OwnRank) -> None:
    """Without CUDA, keep freed blocks of host memory. With CUDA, use all cores if the host adds gradients or steps."""
    if not has_cuda():  # with CUDA the caching allocator keeps blocks, and the host's allocator is left as it is
        keep_freed_blocks()
        return
    numa_node = host_threads.numa_node(torch.device("cuda", torch.cuda.current_device()))
    # A launcher may have given each rank processors of its own, as srun does.
    nodes = gather_objects(place := (dist.get_rank() // own.schedule.parallel.node_size, os.sched_getaffinity(0)))
    adds = any(group.gradients == "host" for group in own.schedule.groups)
    if adds or _steps_on_host(own.schedule) or any(map(steps_on_the_host, own.optimizers)):
        for line in host_threads.use(nodes.count(place), sum(node == place[0] for node, _ in nodes)):
            _say_once(line)
    with_memory = block_pages.memory_nodes()
    if numa_node is not None and with_memory and numa_node not in with_memory:
        say(
            f"rank {dist.get_rank()}: this process may not use memory of NUMA node {numa_node}, which is next to its "
            f"GPU; all its host memory is on nodes {with_memory} and is reached over the link between sockets"
        )


def _say_once(line: str | None) -> None:
    if line is not None and dist.get_rank() == 0:
        say(line)


def _steps_on_host(schedule: Schedule) -> bool:
    """Whether the schedule says how the host's optimizer steps."""
    return (schedule.rollback_bytes, schedule.step_slots, schedule.state_slots) != (None, None, None)


class _Builder:
    """The parts of an executor, each made after the parts that it needs."""

    def __init__(self, own: OwnRank):
        self.own, self.schedule, self.closing = own, own.schedule, []
        self.routes = collective_routes(own.schedules, own.groups, own.process_groups, own.links)
        self.copies = Copies(own)
        # After all collectives, because a single rank may lack the memory and raise.
        self.shards = hold_shards(own.optimizers, own.buckets, own.links) if self.schedule.zero_stage == 3 else None
        for route, groups in self.routes.buffered.items():
            route.make_buffers(groups)
        self.host_step = self._host_step()
        self.reducer = self._reducer()
        self.boundaries = self._boundaries()

    def executor(self) -> Executor:
        own, copies = self.own, self.copies
        steps = () if self.host_step is None else (self.host_step.early, self.host_step.delayed)
        parts = (self.reducer, self.shards, copies.publisher, *steps, self._census())
        executor = Executor(
            self._program(self.schedule.parallel.num_microbatches),
            own.groups,
            own.clock,
            own.residency,
            self.routes.gather.issue,
            own.issuer,
            [part for part in parts if part is not None],
            recorder=own.recorder,
            checks=self._checks(),
            pool=copies.pool,
            drop_staged=copies.drop_staged,
            memory=self._memory_pool(),
            in_turn=self._in_turn(),
            program_for=self._program,
        )
        executor.connects = [route.connect for route in self.routes.buffered]
        _say_once(executor.fill_memory(self._rehearse))
        self._close_at_the_end(executor)
        self._guard_chunks(executor)
        return executor

    # Parts.

    def _host_step(self) -> HostStep | None:
        """The host step; None if Megatron makes it without us, or if no optimizer steps on the host."""
        own, host_step = self.own, None
        if own.groups and (own.delay is not None or _steps_on_host(self.schedule)):
            host_step = HostStep(own, self.copies.publisher)
        units = [] if host_step is None else [unit.optimizer for unit in host_step.units]
        make_gradients(own.optimizers, units)
        if own.links.counts:
            count_own_steps(own, own.links, units)
        return host_step

    def _reducer(self) -> Reducer | None:
        """The reducer of this rank's gradients that come and go, whose shards the optimizers then read; None if all
        gradients stay whole."""
        own, groups = self.own, self.own.bucket_groups
        kept = {index: one.gradient for index, one in sorted(groups.items()) if one.gradient is not None}
        if not kept:
            return None
        on_host = [index for index in kept if self.schedule.groups[index].gradients == "host"]
        held = [
            HeldGradient(groups[index].params, one.shard, one.shard_start, index in on_host, one.whole.device)
            for index, one in kept.items()
        ]
        hold_gradients(own.optimizers, held, own.links)
        if self.schedule.parallel.tensor_model_parallel_size > 1:
            self.closing.append(add_up_shards(held))
        reducer = Reducer(kept, on_host, own.device, own.issuer, self.routes.order, own.links)
        early = None if self.host_step is None else self.host_step.early
        reducer.complete = None if early is None else early.reduced
        return reducer

    def _census(self) -> Census:
        parameters = [parameter for ddp in self.own.ddps for parameter in ddp.module.parameters()]
        return Census(self.own.residency, parameters, self._resting, self.reducer)

    def _resting(self) -> Resting:
        buffer_bytes = sum(route.buffer_bytes for route in self.routes.buffered)
        buffer_bytes += 0 if self.shards is None else self.shards.buffer.nbytes
        return resting_storages(self.own, self.copies, self.host_step, self.reducer, buffer_bytes)

    def _checks(self) -> debug.Checks | None:
        if self.routes.order is None:
            return None
        exchange = lambda value: gather_objects(value, self.own.process_group)
        peaks = {number: device_peaks(one)[self.own.pp_rank] for number, one in self.own.schedules.items()}
        return debug.Checks(peaks, self.routes.order, exchange)

    def _memory_pool(self) -> MemoryPool | None:
        """The pool that this rank's whole parameters and gradients are allocated from; None if it has no groups."""
        if self.own.device is None:
            return None
        pool = MemoryPool(self.own.device)
        self.closing.append(pool.close)
        for held in (*self.own.groups.values(), *({} if self.reducer is None else self.reducer.gradients).values()):
            pool.serve(held)
        return pool

    def _in_turn(self) -> InTurn | None:
        """Brings groups in turn between iterations; None if all groups may be whole at the same time."""
        own, schedule = self.own, self.schedule
        if not memory_bill.short_of_whole(schedule, own.pp_rank):
            return None
        chunks = {index: schedule.groups[index].model_chunk_id for index in own.groups}
        most = device_peaks(schedule)[own.pp_rank]
        return InTurn(own.groups, own.clock, self.routes.gather.issue, self.boundaries, chunks, most)

    # The program.

    def _boundaries(self) -> Boundaries:
        """The boundaries between the layers of this rank's chunks, at which actions can run."""
        own, uses = self.own, uses_of_groups(self.schedule.groups, self.own.workload)
        blocks = [blocks_of(own.workload.chunk(own.pp_rank, n), ddp.config) for n, ddp in enumerate(own.ddps)]
        return Boundaries(own.ddps, {index: uses[index] for index in own.groups}, blocks)

    def _program(self, num_microbatches: int) -> Program:
        """The compiled program for a number of micro-batches per iteration."""
        own, schedule = self.own, schedule_for(self.own.schedules, num_microbatches)
        by_name: dict[str, Any] = self.routes.by_name | self.copies.routes
        rank, checked = schedule.ranks[own.pp_rank], self.routes.order is not None
        placed = place_actions(
            schedule, rank, own.groups, by_name, own.clock, self.boundaries, own.recorder, checked, self.reducer
        )
        threads = any(part is not None for part in (self.copies.publisher, self.host_step, self.reducer))
        return compile_program(placed, self.boundaries, own.issuer.poll if threads else None)

    def _rehearse(self) -> None:
        own = self.own
        for schedule in own.schedules.values():
            rehearse(schedule, schedule.ranks[own.pp_rank], own.groups, own.clock, self.boundaries, self.reducer)

    # The end.

    def _close_at_the_end(self, executor: Executor) -> None:
        """Register what the end of training closes, the last one first: page-locked memory is freed when nothing uses
        it any more."""
        if self.own.device is not None:
            executor.on_close(self.own.device.close)
        executor.on_close(
            *self.closing, self.boundaries.close, *self.copies.closing, *(one.close for one in self.routes.buffered)
        )
        if self.host_step is not None:
            executor.on_close(self.host_step.close)

    def _guard_chunks(self, executor: Executor) -> None:
        """At zero stage 3, let a chunk whose groups are freed refuse to give its state, or give it in turn."""
        groups = self.own.groups
        for chunk_id, ddp in enumerate(self.own.ddps if self.schedule.zero_stage == 3 else ()):
            freed = [g for index, g in groups.items() if self.schedule.groups[index].model_chunk_id == chunk_id]
            guard_state(bare(ddp), freed, None if executor.in_turn is None else executor)
        if executor.in_turn is not None:
            executor.on_close(save_copies(executor))


def schedule_for(schedules: dict[int, Schedule], num_microbatches: int) -> Schedule:
    """The schedule for a number of micro-batches. Raises ScheduleError if there is none."""
    if num_microbatches not in schedules:
        there = ", ".join(map(str, schedules))
        raise ScheduleError(f"the iteration has {num_microbatches} micro-batches, but the schedules are for {there}")
    return schedules[num_microbatches]
