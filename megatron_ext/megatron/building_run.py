"""A run while Megatron builds its model, and the checks and messages before its first iteration.

[Note: Lifecycle] in lifecycle.py describes the later states of a run.
"""

import os
from collections.abc import Collection
from enum import Enum
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import (
    buckets,
    checkpoint_layout,
    checkpoint_states,
    host_optimizers,
    late_memory,
    late_model,
    refusals,
    run_summary,
    states_on_device,
    stock_trace,
)
from megatron_ext.megatron.agreement import agree, refusal
from megatron_ext.megatron.boundaries import bare
from megatron_ext.megatron.describe_model import describe_chunk
from megatron_ext.megatron.equality_check import EqualityCheck
from megatron_ext.megatron.gather_on_read import GatherOnRead
from megatron_ext.megatron.own_rank import OwnRank
from megatron_ext.megatron.recompute import check_recompute
from megatron_ext.megatron.reference_delay import ReferenceDelay
from megatron_ext.megatron.reference_gradients import ReferenceGradients
from megatron_ext.megatron.resting_storages import held_on_host
from megatron_ext.megatron.scheduled_bucket_group import ScheduledBucketGroup, replace_pre_hooks
from megatron_ext.megatron.workload_of_run import numbers_of_run, workload_of_run
from megatron_ext.runtime import drive, free_host_memory, host_threads
from megatron_ext.runtime.device import Device, device_of, has_cuda
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.watch import Watch
from megatron_ext.schedule import match, memory_bill, schedules
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.workload import Workload

STOCK_GATHER = "MEGATRON_EXT_STOCK_GATHER"
"""If this variable is 1, buckets are laid out by the schedule but Megatron gathers. This is the reference that a
scheduled run must equal to the last bit."""


class RunState(Enum):
    """The state of a run, see [Note: Lifecycle]."""

    UNSCHEDULED = "unscheduled"
    BUILDING = "building"
    REFERENCE = "reference"
    READY = "ready"
    CLOSED = "closed"


class BuildingRun:
    """State of a scheduled or traced run on this rank.

    Args:
        schedule: path of the schedule file, or None.
        trace: path of the trace to write, or None.
        check: path of the reference of the equality check, or None.
        parallel: the run's parallel sizes if they are known, so that a schedule for other sizes is refused at once.
        delay: value of --delayed-parameter-update, or None.
        nvme_path: directory on the drive for states that are made before training begins, or None.

    Attributes:
        schedule: the schedule of most iterations; not set without ``schedule``.

    Raises:
        InputError: the schedule cannot be read, is not valid, or is for other parallel sizes; or the reference was
            made with another schedule.
    """

    schedule: Schedule

    def __init__(self, schedule, trace, parallel=None, check=None, delay=None, nvme_path=None):
        self.path, self.trace_path, self.delay = schedule, trace, delay
        self.state = RunState.UNSCHEDULED if schedule is None else RunState.BUILDING
        host_optimizers.forget_chosen()
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        recorder = Recorder(rank, on_device=has_cuda(), iterations=run_summary.SAMPLED if trace is None else None)
        self.own = OwnRank(recorder=recorder, nvme_path=nvme_path)
        self.sample = run_summary.Sample(self.own.recorder)
        self.check: EqualityCheck | None = None
        self.executor: Executor | None = None
        self.watch: Watch | None = None
        self.stock_gather = os.environ.get(STOCK_GATHER) == "1"
        self._error: str | None = None
        self._host_bytes = 0  # host memory that this node needs
        self._looked_late = False
        self._chained: list = []  # Megatron's distributed optimizers
        self._optimizers_pending: set[int] = set()
        self._reference: ReferenceGradients | None = None
        self._reference_delay: ReferenceDelay | None = None
        self._reads: GatherOnRead | None = None
        self._unfinished = False  # an iteration has begun, and the optimizer has not been called since
        if schedule is not None:
            self.sha256 = schedules.sha256(schedule)
            self.own.schedules = schedules.load(schedule)
            last = next(reversed(self.own.schedules.values()))
            self.schedule = last if parallel is None else self.own.schedules.get(parallel.num_microbatches, last)
            if parallel is not None:
                match.match_parallel(self.schedule, parallel, file=schedule)
                # Checked before the model is built, which takes minutes. An error on this node alone is agreed on then.
                _check_copies(self.schedule, nvme_path, file=schedule)
                if self.schedule.uses_drive:
                    self._error = refusal(drive.refuse_no_drive, nvme_path)
            if check is not None:
                rule = "" if delay is None else f" {host_optimizers.DELAY_OPTION} {delay}"
                self.check = EqualityCheck(check, self.sha256 + rule)
                self.stock_gather |= self.check.is_reference
            rest = any(group.gradients or group.states_rest == "nvme" for group in self.schedule.groups)
            built = lambda: not self.stock_gather and self.state is RunState.BUILDING
            late_memory.leave_buffers_out(lambda: rest and built(), lambda: self.late is not None)
            late_model.install(lambda: self.late)
        if trace is not None:
            stock_trace.record_steps(self.own.recorder)
            if rank == 0:
                # Reported now, and not after hours of training whose trace would be lost.
                self._error = self._error or refusal(json_files.check_writable, trace)

    @property
    def late(self) -> late_model.LateModel | None:
        """What builds the model if its parameters never fit whole; None in other runs, and when the model is built. The
        first access is collective."""
        if self.state is not RunState.BUILDING or self.stock_gather:
            return None
        if not self._looked_late and memory_bill.never_whole(self.schedule):
            self._looked_late, pp_rank = True, parallel_state.get_pipeline_model_parallel_rank()
            try:
                if memory_bill.short_of_whole(self.schedule, pp_rank):
                    checkpoint_layout.refuse_conversion()
                    self.own.late = late_model.LateModel(self.schedule, pp_rank)
            except InputError as error:
                self._error = str(error)
            self._agree(self._error)
        return self.own.late

    def _agree(self, error: str | None) -> None:
        kind = f"{'reference' if self.stock_gather else 'scheduled'} {self.delay}"
        agree(error, ("schedule sha256 and kind of run", f"{self.sha256[:12]} {kind}"), file=self.path)

    def _move_to(self, state: RunState) -> None:
        before = self.state
        legal = before is not RunState.CLOSED if state is RunState.CLOSED else before is RunState.BUILDING
        assert legal, f"a run that is {before.value} cannot become {state.value}"
        self.state = state
        if self.own.late is not None:
            self.own.late.close()
        host_optimizers.forget_chosen()
        if self.path is not None:  # replaced functions of Megatron outlive the run and must not keep its memory
            late_memory.leave_buffers_out(lambda: False, lambda: False)
            late_model.install(lambda: None)

    def unshard_all(self) -> None:
        """Bring all parameters whole onto the device; collective."""
        if self.executor is not None:
            self.executor.unshard_all()
        elif self._reference_delay is not None:
            self._reference_delay.apply()

    def _make_whole(self, used: Collection[int] = ()) -> None:
        """Make all parameters whole, or only those in the storages ``used`` if all never fit; collective."""
        if self.executor is not None and self.executor.in_turn is not None:
            self.executor.read(self.executor.in_turn.groups_of(used))
            return
        self.unshard_all()
        if self.executor is None:
            for ddp in self.own.ddps:
                ddp.start_param_sync(force_sync=True)

    # While the model is built.

    def on_ddp_built(self, ddp) -> None:
        """A chunk was built. A chunk built after the setup is not part of the scheduled model and stays Megatron's."""
        if self.state is RunState.BUILDING:
            self._lay_out(ddp)
        if self.path is None or self.stock_gather:
            stock_trace.record_gathers(ddp, self.own.recorder)

    def _lay_out(self, ddp) -> None:
        chunk = len(self.own.ddps)
        self.own.ddps.append(ddp)
        if has_cuda():  # before host memory is made
            host_threads.bind(host_threads.numa_node(torch.device("cuda", torch.cuda.current_device())))
        place, every = (parallel_state.get_pipeline_model_parallel_rank(), chunk), enumerate(self.schedule.groups)
        groups = {index: group for index, group in every if (group.pp_rank, group.model_chunk_id) == place}
        cls = buckets.upstream._ParamAndGradBucketGroup if self.stock_gather else ScheduledBucketGroup
        late_memory.tell_what_is_not_locked()
        checkpoint_states.install()
        late = self.late  # this access is collective
        try:
            refusals.refuse_ddp_config(ddp.ddp_config)
            refusals.refuse_model(bare(ddp))
            match.match_layers(self.schedule, ddp.config.num_layers, file=self.path)
            checkpoint_layout.refuse_other_groups(self.schedule.groups, buckets.lie_in_order(ddp, groups))
            if not self.stock_gather:
                parallel = self.schedule.parallel
                buckets.require_host_memory(ddp, groups, min(parallel.node_size, parallel.world_size))
        except InputError as error:
            self._error = self._error or str(error)
        self._agree(self._error)  # the groups of a model that is built late are broadcast next
        lay_out = partial(buckets.lay_out_buckets, ddp, groups, file=self.path, bucket_group_class=cls, late=late)
        # Megatron's next collectives need a model on every rank.
        self._agree(refusal(lambda: self.own.bucket_groups.update(lay_out())))
        of_experts = getattr(ddp, "expert_parallel_bucket_groups", ())
        if of_experts:
            first = next(index for index, own in self.own.bucket_groups.items() if own in of_experts)
            checkpoint_layout.refuse_other_experts(first)
        on_device = [index for index in groups if groups[index].states_rest == "device"]
        if on_device:
            states_on_device.keep_states_on_device(map(self._stored, on_device))
        if self.late is not None:
            ddp.broadcast_params = lambda: None  # groups were broadcast as they were laid out
        if not self.stock_gather:
            replace_pre_hooks(ddp, self._make_whole)
            on_drive = [index for index in groups if groups[index].states_rest == "nvme"]
            if on_drive and self.own.nvme_path is not None:
                late_memory.leave_copies_out(map(self._stored, on_drive), self.own.nvme_path)
                checkpoint_states.refuse_without_room()

    def _stored(self, index: int) -> torch.Tensor:
        """The tensor that holds the parameters of group ``index`` which the optimizer gets."""
        late = self.late
        return self.own.bucket_groups[index].buckets[0].param_data if late is None else late.rest_of(index)

    def _check(self, args) -> None:
        """Refuse a run for which the schedule was not made; collective.

        Args:
            args: Megatron's arguments, which give the parallel sizes. The chunks are taken from what all ranks hold.

        Raises:
            InputError: on this rank.
        """
        if not self.own.ddps:
            self._error = "no model chunk passed the hook in DistributedDataParallel: is this Megatron patched?"
        self._error = self._error or refusals.schedule_without_hooks()
        flushed = refusal(late_memory.flush, self.own.optimizers)  # on all ranks, before any of them looks for memory
        pp_rank, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
        describe = lambda: chunks.extend(describe_chunk(ddp, pp_rank, n) for n, ddp in enumerate(self.own.ddps))
        self._error = self._error or flushed or refusal(describe)  # may fail on one rank; the others wait in a gather
        errors, everybody, held = zip(*gather_objects((self._error, chunks, self._held_on_host())))
        if (error := next(filter(None, errors), None)) is not None:
            raise InputError(error)
        seen = {(chunk.model_chunk_id, chunk.pp_rank): chunk for chunks in everybody for chunk in chunks}
        self.own.workload = workload = msgspec.structs.replace(
            workload_of_run(args), chunks=tuple(seen[key] for key in sorted(seen)), zero_stage=self.schedule.zero_stage
        )
        _check_copies(self.schedule, self.own.nvme_path, file=self.path)
        if any(group.gradients for group in self.schedule.groups):
            on_host = any(group.gradients == "host" for group in self.schedule.groups)
            refusals.refuse_with_gradients(args, self.own.ddps[0].config, on_host)
        check_recompute(self.schedule.zero_stage, self.own.ddps[0].config)
        refusals.refuse_checkpoints(args, self.schedule)
        match.match(self.schedule, workload, file=self.path)
        self._check_numbers(args, workload)
        refusals.refuse_host_shards_of_aware_optimizer(self.schedule, args, file=self.path)
        device = device_of_chunks(self.own.ddps)
        refusals.refuse_without_stream_flags(self.schedule, device.why_no_flags, self.delay is not None, file=self.path)
        taken = memory_bill.host_bytes_taken(self.schedule, workload, held, getattr(args, "save", None) is not None)
        self._host_bytes = taken[dist.get_rank() // self.schedule.parallel.node_size]
        what = "host copies, staging slots, shards, gradients, optimizer states and checkpoints"
        free_host_memory.require(self._host_bytes, what)
        for number, schedule in self.own.schedules.items():
            memory_bill.check_run(schedule, workload.with_microbatches(number), file=self.path)

    def _held_on_host(self) -> tuple[int, int]:
        rest = {index: self.schedule.groups[index].states_rest for index in self.own.bucket_groups}
        on_drive = {self._stored(index).untyped_storage()._cdata for index in rest if rest[index] == "nvme"}
        return held_on_host(self.own.ddps, self.own.late, self.own.optimizers, on_drive)

    def _check_numbers(self, args, workload: Workload) -> None:
        """Check that every number of micro-batches that the run will reach has a schedule, and that all schedules are
        for this model. Raises InputError."""
        schedules = self.own.schedules
        for number, schedule in schedules.items():
            match.match(schedule, workload.with_microbatches(number), file=self.path)
        for number in numbers_of_run(args, getattr(args, "consumed_train_samples", 0)):
            if number not in schedules:
                why = f"there are schedules only for {', '.join(map(str, schedules))}, but the batch size of this run"
                why += " reaches this number; describe and plan with the options of this training"
                raise InputError(why, file=self.path, field="num_microbatches", value=number)

    def _announce(self, args) -> None:
        """Print what this run does, and why its prediction may not hold."""
        lines = run_summary.start_lines(self.schedule, self.path, self.trace_path, reference=self.stock_gather)
        lines += refusals.environment_mismatch(self.schedule, self.path)
        if len(schedules := self.own.schedules) > 1:
            lines.append(f"schedules for {', '.join(map(str, schedules))} micro-batches, as the batch size grows")
        if not self.stock_gather:
            lines += refusals.replaced_options(args)
        if self.delay is not None:
            lines.append(host_optimizers.delay_line(self.delay))
        if self.check is not None:
            lines += self.check.start_lines()
        if has_cuda():
            lines += refusals.warnings_at_start(args, self.schedule)
        run_summary.say(*lines)


def device_of_chunks(chunks: list) -> Device:
    """The device of the parameters of a rank's model chunks. Some or all of the chunks may have no parameters."""
    return device_of(next((parameter for chunk in chunks for parameter in chunk.parameters()), torch.empty(0)))


def _check_copies(schedule: Schedule, nvme_path, *, file) -> None:
    """Refuse host and NVMe copies for which this run has no place."""
    if nvme_path is None and schedule.uses_drive:
        on_drive = any(group.states_rest == "nvme" for group in schedule.groups)
        said = f"the schedule {'keeps optimizer states on' if on_drive else 'publishes to'} nvme; give a directory"
        raise InputError(said, file=file, field=drive.OPTION, value=None)
    if schedule.publish:
        (schedule.metadata.options.nvme or DriveReads()).check("metadata.options.nvme", file=file)
