"""One training run that is scheduled, traced, or both: from its options to its end. The hooks call it.

[Note: Lifecycle]
1. BUILDING: Megatron builds model chunks. The buckets of each are laid out by the schedule's groups, and then the
   optimizer takes its views of them.
2. ``on_train_setup``: the model is compared with the schedule, all ranks agree or all refuse, routes are prepared, the
   program is compiled, host copies are published. The run is READY: every iteration runs the program.
   With MEGATRON_EXT_STOCK_GATHER=1, or as the first run of an equality check, it is REFERENCE instead: Megatron
   gathers at the schedule's bucket layout.
3. ``finish``: parameters are whole if they may be read later, threads have ended and mappings are freed. The run is
   CLOSED.
A run without a schedule is UNSCHEDULED from the start: Megatron gathers, and a trace is recorded.
While BUILDING all ranks also agree: before a model is built late, and before and after the groups of each chunk are
laid out. If a single rank gave up, the others would wait for it in a collective.
"""

import pickle
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.formats import trace as trace_file
from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.megatron import run_summary
from megatron_ext.megatron.agreement import agree, refusal
from megatron_ext.megatron.build_executor import build_executor, ready_the_host, schedule_for
from megatron_ext.megatron.building_run import STOCK_GATHER as STOCK_GATHER
from megatron_ext.megatron.building_run import BuildingRun, RunState
from megatron_ext.megatron.equality_check import iterations_ahead, parameter_digest
from megatron_ext.megatron.gather_on_read import GatherOnRead
from megatron_ext.megatron.one_line_end import says_all
from megatron_ext.megatron.optimizer_steps import OptimizerSteps
from megatron_ext.megatron.reference_delay import ReferenceDelay
from megatron_ext.megatron.reference_gradients import ReferenceGradients
from megatron_ext.megatron.shards import steps_on_the_host
from megatron_ext.runtime import node_groups
from megatron_ext.runtime.census import Census
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.host_step.early import EarlySteps
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.recorder import NOTHING
from megatron_ext.runtime.step_calls import IDLE, StepCalls
from megatron_ext.runtime.watch import DEFAULT_STEP_SECONDS, Watch


class Run(BuildingRun):
    """State of a scheduled or traced run on this rank."""

    _steps: OptimizerSteps

    # Once, before the first step.

    def on_train_setup(self, args, model, optimizer, config) -> None:
        """Agree over all ranks, then prepare everything; collective.

        Args:
            args: Megatron's arguments.
            optimizer: Megatron's optimizer of the run.

        Raises:
            InputError: on every rank, with the same text.
        """
        after = [self._step_ended]
        if self.path is None:
            agree(self._error, ("trace", str(self.trace_path)), file=self.trace_path)
        else:
            assert self.state is RunState.BUILDING, f"training can begin only once; the run is {self.state.value}"
            if self.late is not None:
                self.late.close()
            self.own.nvme_path = getattr(args, "user_defined_schedule_nvme_path", None) or self.own.nvme_path
            self._chained = list(getattr(optimizer, "chained_optimizers", [optimizer]))
            self.own.optimizers = [one for one in self._chained if not getattr(one, "is_stub_optimizer", False)]
            self._together(self._check, args)
            if dist.get_rank() == 0:
                self._announce(args)
            if self.check is not None:
                self.check.iterations = iterations_ahead(args)
                after.append(self.check.note)
            self.own.delay = None if self.delay is None else (getattr(args, "iteration", 0), self.delay)
            self._together(self._take_shards)
            self._together(self._prepare, args, optimizer)
            self._begin()
            self._watch_reads(optimizer)
        traced = self.own.recorder if self.trace_path is not None else NOTHING
        self._steps = OptimizerSteps(optimizer, *after, recorder=traced)

    def _together(self, step: Callable[..., None], *arguments) -> None:
        """Call ``step``, which may fail on this rank alone: then all ranks refuse, otherwise all go on; collective."""
        try:
            refused = refusal(step, *arguments)
        except (OSError, RuntimeError) as error:  # on this rank alone: memory cannot be pinned, for example
            refused = f"rank {dist.get_rank()} cannot prepare for {self.path}: {error}".splitlines()[0]
        self._agree(refused)

    def _take_shards(self) -> None:
        """Make this rank's groups, unless Megatron gathers. Their shards in host memory are page-locked here, before
        any collective uses them."""
        if not self.stock_gather:
            ready_the_host(self.own)
            assert self.own.groups.keys() == self.own.bucket_groups.keys()

    def _prepare(self, args, optimizer) -> None:
        """Make the executor of this run, or the parts of the reference."""
        if not self.stock_gather:
            minutes = getattr(args, "distributed_timeout_minutes", None)
            node_groups.patience = None if minutes is None else timedelta(minutes=minutes)
            self.watch = Watch(dist.get_rank(), _step_seconds(args))
            self.executor = build_executor(self.own)
            return
        if self.own.delay is not None:
            self._reference_delay = ReferenceDelay(optimizer, self.own.optimizers, self.own.ddps, *self.own.delay)
        if any(group.gradients for group in self.schedule.groups):
            self._reference = ReferenceGradients(self.schedule, self.own.bucket_groups, self.own.optimizers)

    def _step_ended(self, result: tuple) -> None:
        """The optimizer has stepped, which ends the iteration: Megatron's rerun machinery may run the forwards and
        backwards of an iteration several times."""
        self._unfinished = False
        if self.executor is not None and not result[0]:
            self.own.recorder.end_count()
            self.executor.step_skipped()

    def _begin(self) -> None:
        """Start what was prepared on all ranks."""
        if self.stock_gather:
            self._move_to(RunState.REFERENCE)
            return
        assert self.executor is not None and self.watch is not None
        for bucket_group in self.own.bucket_groups.values():
            bucket_group.executor = self.executor
        self._move_to(RunState.READY)
        connect_ranks(self.executor.connects)
        self.watch.executor = self.executor
        # The initial parameters are whole on all ranks; they are published so that the first iteration runs like all
        # others. Megatron's host optimizer may hold other values after a checkpoint; Megatron computes on these first.
        self.executor.params_updated(by_optimizer=False)
        if self.schedule.zero_stage == 3:
            self.executor.sync_parameters()  # Megatron may hash its weights before the first iteration

    def _watch_reads(self, optimizer) -> None:
        """Notice uses of parameters between iterations, see [Note: Reads between iterations]."""
        parameters = (parameter for one in self.own.bucket_groups.values() for parameter in one.params)
        storages = {parameter.untyped_storage()._cdata for parameter in parameters}
        in_turn = None if self.executor is None else self.executor.in_turn
        missing = None if in_turn is None else in_turn.missing
        self._reads = reads = GatherOnRead(storages, self._make_whole, self._replicas(), missing=missing)
        optimizer.zero_grad = reads.unnoticed(optimizer.zero_grad)  # it reads the gradient of every parameter
        if self.executor is not None:
            self.executor.reads = reads
            if in_turn is not None:
                reads.open()
        else:
            *others, last = self.own.ddps
            for ddp in others:
                ddp.start_param_sync = reads.unnoticed(ddp.start_param_sync)
            last.start_param_sync = reads.until_forced(last.start_param_sync)

    def _replicas(self) -> list[int]:
        """Global ranks that gather together; with experts they can be in several data-parallel groups."""
        parallel, pp_rank = self.schedule.parallel, parallel_state.get_pipeline_model_parallel_rank()
        apart = {group.ranks for group in self.schedule.groups} != {parallel.dp}
        all_of_stage = apart and parallel.etp != parallel.tensor_model_parallel_size
        sets = [ranks for ranks in parallel.replicas(pp_rank) if all_of_stage or dist.get_rank() in ranks]
        return sorted(rank for ranks in sets for rank in ranks)

    # Every iteration.

    def begin_iteration(self, num_microbatches: int, forward_only: bool) -> StepCalls:
        """Called by Megatron's schedules; returns the object that its steps call."""
        if self._reads is not None:
            self._reads.close()
        again = self._unfinished
        self._unfinished = again or not forward_only
        if not forward_only:
            if again:
                self.sample.run_again(self.own.recorder.iteration)
            else:
                self.own.recorder.begin_iteration()
                self.sample.begin_iteration(self.own.recorder.iteration, num_microbatches)
        if self.state is RunState.BUILDING and not self.stock_gather and (self.late is not None or not forward_only):
            what = "an evaluation of parameters that never fit whole" if forward_only else "training"
            raise ScheduleError(f"{what} begins before megatron_ext.megatron.hooks.on_train_setup was called")
        if self._reference_delay is not None and forward_only:
            self._make_whole()  # as a run by the schedule does, even if the script does not ask for it
        elif self._reference_delay is not None and not again:
            self._reference_delay.begin()
        if self._reference is not None and self.state is RunState.REFERENCE and not forward_only:
            self._reference.begin(schedule_for(self.own.schedules, num_microbatches))
            return self._reference
        if self.state is not RunState.READY:
            return IDLE
        assert self.executor is not None
        if forward_only:
            return self.executor.evaluation() or IDLE
        self._steps.watch()
        self._steps.check()
        self.executor.expect(num_microbatches)
        self.executor.begin_iteration()
        return self.executor

    def on_params_updated(self, optimizer, update_successful: bool) -> None:
        """One of the run's optimizers has written new shards; publish after the last one."""
        self._unfinished = False
        on_host = self.executor is not None and any(group.gradients == "host" for group in self.schedule.groups)
        if steps_on_the_host(optimizer):  # before core_v0.16 its step does not wait for its copies to the device
            torch.cuda.current_stream().wait_stream(optimizer.optimizer._h2d_stream)
        elif on_host:
            optimizer.zero_grad()  # frees the gradients of this step, which Megatron keeps until the next iteration
        if not update_successful:  # the result of the step says so, too
            return
        self._optimizers_pending.add(id(optimizer))
        if len(self._optimizers_pending) < len(self._chained):
            return
        self._optimizers_pending.clear()
        if self.executor is not None:
            self._steps.told += 1
            self.own.recorder.end_count()
            self.executor.params_updated()
        elif self._reads is not None:
            self._reads.open()

    def params_changed(self) -> None:
        """Anything but the optimizer has changed parameters: publish them again."""
        if self.executor is not None:
            self.executor.params_changed()

    def peak_bytes(self) -> int:
        """The peak of whole parameters on this rank's device in the last iteration, in bytes; 0
        without a schedule."""
        return self.executor.peak_bytes if self.executor is not None else 0

    def census(self) -> RankMemory | None:
        """Bytes that this rank held at the peak of the last iteration; None without a schedule."""
        census = self.executor.part(Census) if self.executor is not None else None
        if census is None or self._reads is None:
            return None
        with self._reads.suspended():
            return census.memory()

    # At the end.

    def finish(self, read_later: bool = True) -> bool:
        """End threads and mappings, write the trace, and print what was measured; collective.

        Args:
            read_later: leave parameters whole for later reads; if they never fit whole, the run stays open for these
                reads. Otherwise parameters that zero stage 3 has freed stay freed, except for an equality check. At
                other stages they are made whole, because a stale parameter would not be noticed.

        Returns:
            Whether the run stays open, until :meth:`close`.

        Raises:
            InputError: on every rank, where the run differs from the reference of its equality check.
        """
        if self._reads is not None:
            self._reads.close()
        never_whole = self.executor is not None and self.executor.in_turn is not None
        brought = self.executor is None or read_later or self.check is not None or self.schedule.zero_stage < 3
        if brought:
            self._make_whole()
        digest = parameter_digest(self.own.ddps) if self.check is not None else ""
        early = self.executor.part(EarlySteps) if self.executor is not None else None
        steps = (early.taken, early.taken_back) if early is not None else (0, 0)
        trained = self.state in (RunState.READY, RunState.REFERENCE)
        goes_on = read_later and never_whole
        if not goes_on:
            self.close(freed=never_whole or not brought)
        if self.trace_path is not None:
            # As bytes: only the first rank makes objects of them, which takes a minute and 4 GB for 20 million events.
            mine = pickle.dumps((self.own.recorder.events(), list(self.own.recorder.counted.values())))
            everybody = gather_objects(mine)
            if dist.get_rank() == 0:
                events, moved = zip(*map(pickle.loads, everybody))
                by = self.sha256 if self.path is not None and not self.stock_gather else None
                about = trace_file.AboutTraining(by is not None, by, self.own.recorder.on_device, [*moved])
                try:
                    trace_file.save(self.trace_path, [*chain.from_iterable(events)], about=about)
                except InputError as error:  # the trained model and its metrics matter more
                    run_summary.say(f"there is no trace of this run: {error}")
        if trained:
            self._report(digest, steps)
        return goes_on

    def close(self, freed: bool = True) -> None:
        """End threads and mappings. With ``freed``, parameters stay freed and a forward is refused."""
        if self._reads is not None:
            self._reads.close()
        if self.executor is not None:
            if freed:
                self.executor.let_go()
                for ddp in self.own.ddps:
                    ddp.module.register_forward_pre_hook(_refuse_forward)
            self.executor.close()
            self.executor = None
            if self.watch is not None:
                self.watch.close()
            for bucket_group in self.own.bucket_groups.values():
                bucket_group.end()
        self._move_to(RunState.CLOSED)

    def _report(self, digest: str, steps: tuple[int, int]) -> None:
        """Print on the first rank what was measured and whether the check holds; collective. ``steps``: the number of
        steps during the backward, and of those that were taken back."""
        everybody = gather_objects((self.sample.of_rank(), digest, steps))
        error = None
        if dist.get_rank() == 0:
            measured = run_summary.combine_ranks([times for times, *_ in everybody])
            compared = self.check.reference.measured if self.check and self.check.reference else None
            sampled = self.own.schedules.get(self.sample.num_microbatches, self.schedule)
            lines = run_summary.end_lines(sampled, measured, compared, reference=self.stock_gather)
            lines += run_summary.early_lines(*(sum(steps[which] for *_, steps in everybody) for which in (0, 1)))
            try:
                lines += self.check.finish([digest for _, digest, _ in everybody], measured) if self.check else []
            except InputError as differs:
                error = str(differs)
            run_summary.say(*lines)
        if self.check is not None:
            self._agree(error)


def _refuse_forward(*_) -> None:
    raise ScheduleError(
        "training has ended and its parameters were freed, because no checkpoint or evaluation was to follow: call "
        "megatron_ext.megatron.hooks.finish() before the end of Megatron's train to keep them"
    )


def connect_ranks(connects: Iterable[Callable[[], None]]) -> None:
    """Make communicators between ranks. A rank where this fails ends alone: others may wait for it in NCCL until their
    launcher ends them, so ranks cannot agree here.

    Raises:
        InputError: in place of an error that a traceback would tell, for example of NCCL.
    """
    try:
        for connect in connects:
            connect()
    except RuntimeError as error:
        if says_all(error):
            raise
        text = one_line(str(error), 300)
        raise InputError(f"rank {dist.get_rank()} cannot connect to the ranks that it gathers with: {text}") from error


def _step_seconds(args) -> float:
    """Seconds without the end of a step after which this run ends. Raises InputError."""
    given = getattr(args, "user_defined_schedule_step_timeout", None)
    if given is None:
        minutes = getattr(args, "distributed_timeout_minutes", None)
        return DEFAULT_STEP_SECONDS if minutes is None else 54.0 * minutes
    if not 0 <= given < float("inf"):
        raise InputError("must be 0 or more seconds", field="--user-defined-schedule-step-timeout", value=given)
    return given
