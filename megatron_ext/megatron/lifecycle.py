"""One training run that is scheduled, traced, or both: from its options to its end. The hooks call it.

[Note: Lifecycle]
1. BUILDING: Megatron builds model chunks. The buckets of each are laid out by the schedule's groups, and then the
   optimizer takes its views of them.
2. ``on_train_setup``: the model is compared with the schedule, all ranks agree or all refuse, routes are prepared, the
   program is compiled, host copies are published. The run is READY: every iteration runs the program.
   With MEGATRON_EXT_STOCK_GATHER=1, or as the first run of an equality check, it is REFERENCE instead: Megatron
   gathers at the schedule's bucket layout.
3. ``finish``: parameters are whole where somebody reads them, threads and mappings are gone. The run is CLOSED.
A run without a schedule is UNSCHEDULED from the start: Megatron gathers, and a trace is recorded.
An error while BUILDING is kept until ``on_train_setup``: a single rank that gave up earlier would leave the others
waiting for it in a collective.
"""

import os
from enum import Enum

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.formats import json_files
from megatron_ext.formats import trace as trace_file
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.megatron import (
    buckets,
    checkpoint_experts,
    checkpoint_states,
    host_optimizers,
    late_memory,
    refusals,
    run_summary,
    states_on_device,
    stock_trace,
)
from megatron_ext.megatron.agreement import agree, gather_objects
from megatron_ext.megatron.boundaries import bare
from megatron_ext.megatron.describe_model import describe_chunk
from megatron_ext.megatron.equality_check import EqualityCheck, iterations_ahead, parameter_digest
from megatron_ext.megatron.gather_on_read import GatherOnRead
from megatron_ext.megatron.optimizer_steps import OptimizerSteps
from megatron_ext.megatron.pre_hooks import replace_pre_hooks
from megatron_ext.megatron.prepare import prepare
from megatron_ext.megatron.recompute import check_recompute
from megatron_ext.megatron.reference_delay import ReferenceDelay
from megatron_ext.megatron.reference_gradients import ReferenceGradients
from megatron_ext.megatron.step_calls import IDLE, StepCalls
from megatron_ext.megatron.workload_of_run import workload_of_run
from megatron_ext.runtime import block_pages, faults, host_memory, host_threads
from megatron_ext.runtime.device import device_of, has_cuda
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.host_step.early import EarlySteps
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.watch import DEFAULT_STEP_SECONDS, Watch
from megatron_ext.schedule import match, memory_bill, validate
from megatron_ext.schedule.state_placement import host_bytes_taken
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import DriveReads

STOCK_GATHER = "MEGATRON_EXT_STOCK_GATHER"
"""Set to 1: lay buckets out by the schedule but gather as Megatron does. The reference that a
scheduled run must equal to the last bit."""


class State(Enum):
    """Where a run is, see [Note: Lifecycle]."""

    UNSCHEDULED = "unscheduled"
    BUILDING = "building"
    REFERENCE = "reference"
    READY = "ready"
    CLOSED = "closed"


NEXT_STATES = {
    State.UNSCHEDULED: {State.CLOSED},
    State.BUILDING: {State.REFERENCE, State.READY, State.CLOSED},
    State.REFERENCE: {State.CLOSED},
    State.READY: {State.CLOSED},
    State.CLOSED: set(),
}


def _unwritable(trace) -> str | None:
    """Why a trace cannot be written, said before hours of training whose trace would be lost; or None."""
    try:
        json_files.check_writable(trace)
    except InputError as error:
        return str(error)
    return None


class Run:
    """State of a scheduled or traced run on this rank.

    Args:
        schedule: path of the schedule file, or None.
        trace: path of the trace to write, or None.
        check: path of the reference of the equality check, or None.
        parallel: the run's parallel sizes where they are known, so that a schedule for others is refused at once.
        delay: value of --delayed-parameter-update, or None.
        nvme_path: directory on the drive where states are put before training begins, or None.

    Raises:
        InputError: the schedule cannot be read, is not valid, or is for other parallel sizes; or the reference is of
            another schedule.
    """

    def __init__(self, schedule, trace, parallel=None, check=None, delay=None, nvme_path=None):
        self.path, self.trace_path, self.delay, self.nvme_path = schedule, trace, delay, nvme_path
        self.state = State.UNSCHEDULED if schedule is None else State.BUILDING
        host_optimizers.forget_chosen()
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        self.recorder: Recorder | None = None
        if trace is not None or schedule is not None:
            sampled = run_summary.SAMPLED if trace is None else None
            self.recorder = Recorder(rank, on_device=has_cuda(), iterations=sampled)
            self.sample = run_summary.Sample(self.recorder)
        self.check: EqualityCheck | None = None
        self.schedule: Schedule | None = None
        self.executor: Executor | None = None
        self.watch: Watch | None = None
        self.stock_gather = os.environ.get(STOCK_GATHER) == "1"
        self._ddps: list = []
        self._bucket_groups: dict = {}
        self._error: str | None = None
        self._host_bytes = 0  # that this node needs
        self._optimizers: list = []
        self._optimizers_pending: set[int] = set()
        self._steps: OptimizerSteps | None = None
        self._reference: ReferenceGradients | None = None
        self._reference_delay: ReferenceDelay | None = None
        self._reads: GatherOnRead | None = None
        self._unfinished = False  # an iteration has begun, and the optimizer has not been called since
        if schedule is not None:
            self.sha256 = json_files.sha256(schedule)
            self.schedule = validate.load(schedule)
            self.faults = faults.from_environment()
            if parallel is not None:
                match.match_parallel(self.schedule, parallel, file=schedule)
            if check is not None:
                rule = "" if delay is None else f" {host_optimizers.DELAY_OPTION} {delay}"
                self.check = EqualityCheck(check, self.sha256 + rule)
                self.stock_gather |= self.check.is_reference
            rest = any(group.gradients or group.states_rest == "nvme" for group in self.schedule.groups)
            late_memory.leave_gradients_out(lambda: rest and not self.stock_gather and self.state is State.BUILDING)
        if trace is not None and self.recorder is not None:
            stock_trace.record_steps(self.recorder)
            if rank == 0:
                self._error = _unwritable(trace)

    def _move_to(self, state: State) -> None:
        assert state in NEXT_STATES[self.state], f"a run that is {self.state.value} cannot become {state.value}"
        self.state = state
        host_optimizers.forget_chosen()

    # While the model is built.

    def on_ddp_built(self, ddp) -> None:
        """A chunk was built. One that is built after the setup is not of the scheduled model and stays Megatron's."""
        if self.state is State.BUILDING:
            self._lay_out(ddp)
        if self.recorder is not None and (self.schedule is None or self.stock_gather):
            stock_trace.record_gathers(ddp, self.recorder)

    def _lay_out(self, ddp) -> None:
        assert self.schedule is not None
        chunk = len(self._ddps)
        self._ddps.append(ddp)
        if has_cuda():  # before host memory is made
            host_threads.bind(host_threads.numa_node(torch.device("cuda", torch.cuda.current_device())))
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        groups = {
            index: group
            for index, group in enumerate(self.schedule.groups)
            if (group.pp_rank, group.model_chunk_id) == (pp_rank, chunk)
        }
        cls = buckets.upstream._ParamAndGradBucketGroup if self.stock_gather else buckets.ScheduledBucketGroup
        checkpoint_states.allow_empty_shards()
        try:
            refusals.refuse_ddp_config(ddp.ddp_config)
            refusals.refuse_frozen(bare(ddp))
            match.match_layers(self.schedule, ddp.config.num_layers, file=self.path)
            self._bucket_groups.update(
                buckets.lay_out(
                    ddp,
                    groups,
                    file=self.path,
                    bucket_group_class=cls,
                    ranks_of_node=min(self.schedule.parallel.node_size, self.schedule.parallel.world_size),
                )
            )
        except InputError as error:
            self._error = self._error or str(error)
            return
        of_experts = getattr(ddp, "expert_parallel_bucket_groups", ())
        if of_experts:
            first = next(index for index, own in self._bucket_groups.items() if own in of_experts)
            checkpoint_experts.refuse_other_experts(first)
        on_device = [index for index in groups if groups[index].states_rest == "device"]
        if on_device:
            stored = (self._bucket_groups[index].buckets[0].param_data for index in on_device)
            states_on_device.keep_states_on_device(stored)
        if not self.stock_gather:
            replace_pre_hooks(ddp, self.unshard_all)
            on_drive = [index for index in groups if groups[index].states_rest == "nvme"]
            if on_drive and self.nvme_path is not None:
                stored = (self._bucket_groups[index].buckets[0].param_data for index in on_drive)
                late_memory.leave_copies_out(stored, self.nvme_path)
                checkpoint_states.refuse_without_room()

    # Once, before the first step.

    def on_train_setup(self, args, model, optimizer, config) -> None:
        """Agree over all ranks, then prepare everything; collective.

        Args:
            args: Megatron's.
            optimizer: Megatron's optimizer of the run.

        Raises:
            InputError: on every rank, with the same text.
        """
        if self.schedule is None:
            agree(self._error, ("trace", str(self.trace_path)), file=self.trace_path)
        else:
            assert self.state is State.BUILDING, f"training begins once; the run is {self.state.value}"
            nvme_path = getattr(args, "user_defined_schedule_nvme_path", None)
            self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
            self._agree(self._mismatch(args, nvme_path))
            if dist.get_rank() == 0:
                self._announce(args)
            if self.check is not None:
                self.check.watch(optimizer, iterations_ahead(args))
            begun = getattr(args, "iteration", 0)
            if self.stock_gather:
                self._agree(self._try_to_delay_reference(optimizer, begun))
                if any(group.gradients for group in self.schedule.groups):
                    self._reference = ReferenceGradients(self.schedule, self._bucket_groups, self._optimizers)
                self._move_to(State.REFERENCE)
            else:
                self.watch = Watch(dist.get_rank(), _step_seconds(args))
                self._agree(self._try_to_prepare(nvme_path, begun))
                self._begin()
                assert self.executor is not None
                self._steps = OptimizerSteps(optimizer, self._step_skipped)
            self._watch_reads(optimizer)
        if self.trace_path is not None and self.recorder is not None:
            stock_trace.record_optimizer(optimizer, self.recorder)
        self._end_iterations_by(optimizer)

    def _end_iterations_by(self, optimizer) -> None:
        """Megatron's rerun machinery may run the steps of an iteration several times: it ends with the optimizer."""
        step = optimizer.step

        def ending(*args, **kwargs):
            result = step(*args, **kwargs)
            self._unfinished = False
            return result

        optimizer.step = ending

    def _agree(self, error: str | None) -> None:
        kind = f"{'reference' if self.stock_gather else 'scheduled'} {self.delay}"
        agree(error, ("schedule sha256 and kind of run", f"{self.sha256[:12]} {kind}"), file=self.path)

    def _mismatch(self, args, nvme_path) -> str | None:
        """Why this run is not the one that the schedule is for, or None; collective.

        Args:
            args: Megatron's, which say this run's parallel sizes; its chunks are what all ranks really hold.
        """
        assert self.schedule is not None
        if not self._ddps:
            self._error = "no model chunk passed the hook in DistributedDataParallel: is this Megatron patched?"
        self._error = self._error or refusals.schedule_without_hooks()
        try:
            late_memory.flush(self._optimizers)  # on all ranks, before any looks how much memory there is
        except InputError as error:
            self._error = self._error or str(error)
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        everybody = gather_objects([describe_chunk(ddp, pp_rank, index) for index, ddp in enumerate(self._ddps)])
        if self._error is not None:
            return self._error
        held = {(chunk.model_chunk_id, chunk.pp_rank): chunk for chunks in everybody for chunk in chunks}
        workload = msgspec.structs.replace(
            workload_of_run(args), chunks=tuple(held[key] for key in sorted(held)), zero_stage=self.schedule.zero_stage
        )
        try:
            _check_copies(self.schedule, nvme_path, file=self.path)
            refusals.refuse_async_save(self.schedule, args)
            if any(group.gradients for group in self.schedule.groups):
                on_host = any(group.gradients == "host" for group in self.schedule.groups)
                refusals.refuse_with_gradients(args, self._ddps[0].config, on_host)
            match.match(self.schedule, workload, file=self.path)
            refusals.refuse_host_shards_of_aware_optimizer(self.schedule, args, file=self.path)
            device = device_of(next(self._ddps[0].parameters()))
            refusals.refuse_without_stream_flags(
                self.schedule, device.why_no_flags, self.delay is not None, file=self.path
            )
            loaded = any(getattr(getattr(one, "optimizer", None), "state", None) for one in self._optimizers)
            taken = host_bytes_taken(self.schedule, workload, loaded)
            self._host_bytes = taken[dist.get_rank() // self.schedule.parallel.node_size]
            host_memory.require(self._host_bytes, "host copies, staging slots, shards and optimizer states")
            memory_bill.check_run(self.schedule, workload, file=self.path)
            check_recompute(self.schedule, workload, self._ddps[0].config, file=self.path)
        except InputError as error:
            return str(error)
        return None

    def _try_to_delay_reference(self, optimizer, begun: int) -> str | None:
        if self.delay is not None:
            try:
                self._reference_delay = ReferenceDelay(optimizer, self._ddps, begun, self.delay)
            except InputError as error:
                return str(error)
        return None

    def _try_to_prepare(self, nvme_path, begun: int) -> str | None:
        """Make the executor; an error of this rank alone is returned, for all ranks to refuse."""
        assert self.schedule is not None
        try:
            self.executor = prepare(
                *(self.schedule, self._ddps, self._bucket_groups, self._optimizers, self.faults, self.recorder),
                nvme_path=nvme_path,
                delay=None if self.delay is None else (begun, self.delay),
            )
        except InputError as error:
            return str(error)
        except (OSError, RuntimeError) as error:  # of one rank alone: memory that cannot be pinned, for example
            return f"rank {dist.get_rank()} cannot prepare for {self.path}: {error}".splitlines()[0]
        return None

    def _begin(self) -> None:
        assert self.schedule is not None and self.executor is not None and self.watch is not None
        for bucket_group in self._bucket_groups.values():
            bucket_group.executor = self.executor
        self._move_to(State.READY)
        self.watch.executor = self.executor
        # The initial parameters are whole everywhere; publishing them lets the first
        # iteration run like every other.
        self.executor.params_updated()
        if self.schedule.zero_stage == 3:
            self.executor.unshard_all()  # Megatron may hash its weights before the first iteration

    def _watch_reads(self, optimizer) -> None:
        """See [Note: Reads between iterations]."""
        parameters = (parameter for bucket_group in self._bucket_groups.values() for parameter in bucket_group.params)
        storages = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._reads = reads = GatherOnRead(storages, self._make_whole, self._replicas())
        optimizer.zero_grad = reads.unnoticed(optimizer.zero_grad)  # it asks every parameter for its gradient
        if self.executor is not None:
            self.executor.reads = reads
        else:
            for ddp in self._ddps:
                ddp.start_param_sync = reads.unnoticed(ddp.start_param_sync)

    def _replicas(self) -> list[int]:
        """Global ranks that gather together: experts may be shared by ranks of several data-parallel groups."""
        assert self.schedule is not None
        parallel, pp_rank = self.schedule.parallel, parallel_state.get_pipeline_model_parallel_rank()
        apart = {group.ranks for group in self.schedule.groups} != {parallel.dp}
        all_of_stage = apart and parallel.etp != parallel.tensor_model_parallel_size
        sets = [ranks for ranks in parallel.replicas(pp_rank) if all_of_stage or dist.get_rank() in ranks]
        return sorted(rank for ranks in sets for rank in ranks)

    def _make_whole(self) -> None:
        self.unshard_all()
        if self.executor is None:
            for ddp in self._ddps:
                ddp.start_param_sync(force_sync=True)

    # Every iteration.

    def begin_iteration(self, num_microbatches: int, forward_only: bool) -> StepCalls:
        """Called by Megatron's schedules; returns the object that its steps call."""
        if self._reads is not None:
            self._reads.close()
        again = self._unfinished
        self._unfinished = again or not forward_only
        if self.recorder is not None and not forward_only:
            if again:
                self.sample.run_again(self.recorder.iteration)
            else:
                self.recorder.begin_iteration()
                self.sample.begin_iteration(self.recorder.iteration)
        if self.state is State.BUILDING and not forward_only and not self.stock_gather:
            raise ScheduleError("training begins before megatron_ext.megatron.hooks.on_train_setup was called")
        if self._reference_delay is not None and not forward_only and not again:
            self._reference_delay.begin()
        if self._reference is not None and self.state is State.REFERENCE and not forward_only:
            self._reference.begin()
            return self._reference
        if self.state is not State.READY:
            return IDLE
        assert self.executor is not None
        if forward_only:
            self.executor.unshard_all()
            return IDLE
        assert self._steps is not None
        self._steps.watch()
        self._steps.check()
        self.executor.expect(num_microbatches)
        self.executor.begin_iteration()
        return self.executor

    def on_params_updated(self, optimizer, update_successful: bool) -> None:
        """One of the run's optimizers has written new shards; publish after the last one."""
        self._unfinished = False
        if update_successful:
            self._optimizers_pending.add(id(optimizer))
            if len(self._optimizers_pending) < len(self._optimizers):
                return
            self._optimizers_pending.clear()
        if self.executor is None:
            if self._reads is not None:
                self._reads.open()
        elif not update_successful:
            self._step_skipped()
        else:
            assert self._steps is not None
            self._steps.told += 1
            if self.recorder is not None:
                self.recorder.end_count()
            self.executor.params_updated()

    def _step_skipped(self) -> None:
        assert self.executor is not None
        if self.recorder is not None:
            self.recorder.end_count()
        self.executor.step_skipped()

    def params_changed(self) -> None:
        """Parameters were changed by anything but the optimizer: publish them again."""
        if self.executor is not None:
            self.executor.params_changed()

    def unshard_all(self) -> None:
        """Bring all parameters whole onto the device; collective."""
        if self.executor is not None:
            self.executor.unshard_all()
        elif self._reference_delay is not None:
            self._reference_delay.apply()

    def peak_bytes(self) -> int:
        """Most bytes of whole parameters on this rank's device in the last iteration; 0 where
        nothing is scheduled."""
        return self.executor.peak_bytes if self.executor is not None else 0

    def census(self) -> RankMemory | None:
        """What this rank held at the peak of the last iteration; None where nothing is scheduled."""
        census = self.executor.census if self.executor is not None else None
        if census is None or self._reads is None:
            return None
        with self._reads.suspended():
            return census.memory()

    # At the end.

    def finish(self, read_later: bool = True) -> None:
        """End threads and mappings, write the trace, say what was measured; collective.

        Args:
            read_later: parameters are left whole, for whoever reads them next. Otherwise those that zero stage 3 has
                freed stay so, but for an equality check; at other stages a stale one would not be noticed.

        Raises:
            InputError: on every rank, where the run differs from the reference of its equality check.
        """
        if self._reads is not None:
            self._reads.close()
        if self.executor is None or read_later or self.check is not None or getattr(self.schedule, "zero_stage", 0) < 3:
            self.unshard_all()
        else:
            self.executor.let_go()
            for ddp in self._ddps:
                ddp.module.register_forward_pre_hook(_refuse_forward)
        digest = self._parameter_digest() if self.check is not None else ""
        early = self.executor.part(EarlySteps) if self.executor is not None else None
        steps = (early.taken, early.taken_back) if early is not None else (0, 0)
        if self.executor is not None:
            self.executor.close()
            self.executor = None
            if self.watch is not None:
                self.watch.close()
            for bucket_group in self._bucket_groups.values():
                bucket_group.end()
        trained = self.state in (State.READY, State.REFERENCE)
        self._move_to(State.CLOSED)
        if self.trace_path is not None and self.recorder is not None:
            everybody = gather_objects((self.recorder.events(), list(self.recorder.counted.values())))
            if dist.get_rank() == 0:
                events = [event for events, _ in everybody for event in events]
                moved = [counted for _, counted in everybody]
                about = {"kind": "measured", "scheduled": self.schedule is not None, "moved_bytes": moved}
                try:
                    trace_file.save(self.trace_path, events, about=about)
                except InputError as error:  # what was trained, and its metrics, are worth more
                    run_summary.say(f"there is no trace of this run: {error}")
        if trained:
            self._report(digest, steps)

    def _parameter_digest(self) -> str:
        """Of this rank's parameters; collective."""
        self._make_whole()
        return parameter_digest(self._ddps)

    def _report(self, digest: str, steps: tuple[int, int]) -> None:
        """Say on the first rank what was measured and whether the check holds; collective. ``steps``: beside the
        backward, and those of them that were taken back."""
        assert self.schedule is not None
        everybody = gather_objects((self.sample.of_rank(), digest, steps))
        error = None
        if dist.get_rank() == 0:
            measured = run_summary.combine([times for times, *_ in everybody])
            reference = self.check.reference if self.check is not None else None
            compared = reference.measured if reference is not None else None
            lines = run_summary.end_lines(self.schedule, measured, compared, reference=self.stock_gather)
            lines += run_summary.early_lines(*(sum(steps[which] for *_, steps in everybody) for which in (0, 1)))
            try:
                lines += self.check.finish([digest for _, digest, _ in everybody], measured) if self.check else []
            except InputError as differs:
                error = str(differs)
            run_summary.say(*lines)
        if self.check is not None:
            self._agree(error)

    def _announce(self, args) -> None:
        """Print what this run does, and where its prediction may not hold."""
        assert self.schedule is not None
        lines = run_summary.start_lines(self.schedule, self.path, self.trace_path, reference=self.stock_gather)
        warning = refusals.environment_mismatch(self.schedule, self.path)
        if warning is not None:
            lines.append(warning)
        if not self.stock_gather:
            lines += refusals.replaced_options(args)
        if self.delay is not None:
            lines.append(host_optimizers.delay_line(self.delay))
        if self.check is not None:
            lines += self.check.start_lines()
        if has_cuda():
            lines += refusals.warnings_at_start(args, self.schedule)
            groups, entries = self.schedule.groups, self.schedule.publish
            shared = min(sum(groups[one.group].bytes for one in entries if "cpu" in one.to), self._host_bytes)
            lines += block_pages.small_page_lines(self._host_bytes - shared, shared)
        run_summary.say(*lines)


def _refuse_forward(*_) -> None:
    raise ScheduleError(
        "training has ended and its parameters were freed, because neither a checkpoint nor an evaluation was to "
        "follow: end it by megatron_ext.megatron.hooks.finish(), called before the end of Megatron's train"
    )


def _step_seconds(args) -> float:
    """After how long without the end of a step this run ends. Raises InputError."""
    given = getattr(args, "user_defined_schedule_step_timeout", None)
    if given is None:
        minutes = getattr(args, "distributed_timeout_minutes", None)
        return DEFAULT_STEP_SECONDS if minutes is None else 54.0 * minutes
    if not 0 <= given < float("inf"):
        raise InputError("must be 0 or more seconds", field="--user-defined-schedule-step-timeout", value=given)
    return given


def _check_copies(schedule: Schedule, nvme_path, *, file) -> None:
    """Refuse copies that this run has no place for."""
    on_drive = any(group.states_rest == "nvme" for group in schedule.groups)
    if nvme_path is None and (on_drive or any("nvme" in entry.to for entry in schedule.publish)):
        raise InputError(
            f"the schedule {'keeps optimizer states on' if on_drive else 'publishes to'} nvme; say where",
            file=file,
            field="--user-defined-schedule-nvme-path",
            value=None,
        )
    if schedule.publish:
        (schedule.metadata.options.nvme or DriveReads()).check("metadata.options.nvme", file=file)
