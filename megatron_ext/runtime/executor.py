"""Runs a compiled program within the training loop: what the hooks call."""

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_ext.runtime.debug import Checks
from megatron_ext.runtime.group import Clock, GroupState, RankGroup, ScheduleError, WholeBytes
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.host_step.delayed import DelayedUpdate
from megatron_ext.runtime.in_turn import InTurn
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.memory_pool import MemoryPool
from megatron_ext.runtime.param_reads import ParamReads
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.program import Program
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.step_calls import StepCalls

SHARDED, UNSHARDING = GroupState.SHARDED, GroupState.UNSHARDING  # a look-up in the enum takes as long as a call

Kind = TypeVar("Kind", bound=Part)


@dataclass(eq=False)
class Executor(StepCalls):
    """Runs a compiled program; one instance per rank.

    Args:
        program: what to call at each step.
        groups: this rank's groups by index.
        clock: the version of the parameters.
        residency: counts the bytes of whole parameters on the device.
        gather: ``gather(group) -> handle``, an all-gather for a group that is not whole when
            something outside a training step needs it.
        issuer: issues the calls that had to wait for threads.
        parts: the parts of the run, in the order in which their methods are called.
        pool: the host pool, or None.
        recorder: where publishing is recorded.
        checks: the checks of the debug mode, or None.
        drop_staged: empties the staging slots.
        memory: the pool for whole groups and gradients, or None if this rank has none.
        in_turn: makes groups whole one after the other if not all of them fit at once; None if they fit.
        program_for: gives the program for another number of micro-batches, or raises ScheduleError; None: there is no
            other.
    """

    program: Program
    groups: dict[int, RankGroup]
    clock: Clock
    residency: WholeBytes
    gather: Callable
    issuer: Issuer
    parts: Sequence[Part] = ()
    pool: HostPool | None = None
    recorder: Recorder = NOTHING
    checks: Checks | None = None
    drop_staged: Callable[[], None] = lambda: None
    memory: MemoryPool | None = None
    in_turn: InTurn | None = None
    program_for: Callable[[int], Program] | None = None

    def __post_init__(self) -> None:
        self._follow(self.program)
        self._count_forward = self._count_backward = self.iterations = 0
        self.peak_bytes = 0  # of whole parameters in the last iteration
        self._delayed = self.part(DelayedUpdate)
        self._left = self.issuer.left  # empty in most steps
        self._undisturbed, self._started = True, False
        self.busy = False  # True between the begin of an iteration and the update of parameters
        self._ended = True  # whether all steps of the last iteration have run
        self.reads: ParamReads | None = None  # open between the update and the next iteration
        self.connects: list[Callable[[], None]] = []  # collective calls, for when all ranks have what they need
        self._close: list[Callable[[], None]] = []
        if self.in_turn is not None:
            self.in_turn.evaluated = lambda: self._watch_reads(True)

    def _follow(self, program: Program) -> None:
        self.program = program
        _, self._forwards, self._backwards = program
        self._num_microbatches = len(self._forwards) // (len({chunk for chunk, _ in self._forwards}) or 1)

    def part(self, kind: type[Kind]) -> Kind | None:
        """The part of class ``kind``, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    # Called by hooks, in the order of a training iteration.

    def start(self) -> None:
        """Issue what the schedule issues as soon as fresh parameters are published."""
        for action in self.program.start:
            action()
        self._started = True

    def begin_iteration(self) -> None:
        """Begin a training iteration: issue what the schedule issues at its start, unless that has been issued."""
        self._watch_reads(False)
        self.busy, self._ended = True, False
        if not self._undisturbed:  # something was gathered outside the program: start from sharded groups
            self._drop_all()
            self._undisturbed = True
        self._count_forward = self._count_backward = 0
        for part in self.parts:  # takes early steps back that no optimizer step followed, before gathers
            part.begin()
        if not self._started:
            self.start()

    def expect(self, num_microbatches: int) -> None:
        """The next iteration has ``num_microbatches`` micro-batches: follow the program for this number.

        Raises:
            ScheduleError: there is no schedule for this number.
        """
        if num_microbatches != self._num_microbatches:
            if self.program_for is None:
                planned = f"the schedule has {self._num_microbatches}"
                raise ScheduleError(f"the iteration has {num_microbatches} micro-batches, but {planned}")
            self._follow(self.program_for(num_microbatches))
            self._undisturbed = False  # the former program's start has issued other groups

    def pre_forward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """Run what the schedule does before this forward. Raises ScheduleError if it expects another step."""
        count = self._count_forward
        chunk, actions = self._forwards[count]
        if chunk != model_chunk_id or count != virtual_microbatch_id:
            self._out_of_order("forward", virtual_microbatch_id, model_chunk_id)
        self._count_forward = count + 1
        if self._left:
            self.issuer.poll()
        for action in actions:
            action()

    def pre_backward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """Run what the schedule does before this backward. Raises ScheduleError if it expects another step."""
        count = self._count_backward
        chunk, actions, _ = self._backwards[count]
        if chunk != model_chunk_id or count != virtual_microbatch_id:
            self._out_of_order("backward", virtual_microbatch_id, model_chunk_id)
        if self._left:
            self.issuer.poll()
        for action in actions:
            action()

    def post_backward(self, virtual_microbatch_id: int) -> None:
        """Run what the schedule does after this backward."""
        count = self._count_backward
        actions = self._backwards[count][2]
        self._count_backward = count + 1
        for action in actions:
            action()
        if self._left:
            self.issuer.poll()

    def end_iteration(self) -> None:
        """End the iteration: drop its whole copies, and wait until its shards are written.

        Raises:
            ScheduleError: a step of the schedule did not run, or nothing waited for a group that was gathered.
        """
        if self._count_forward != len(self._forwards) or self._count_backward != len(self._backwards):
            raise ScheduleError(
                f"the iteration ended after {self._count_forward} forwards and {self._count_backward} backwards; the "
                f"schedule has {len(self._forwards)} and {len(self._backwards)}"
            )
        for part in self.parts:
            part.end()
        self.peak_bytes = self.residency.peak
        for group in self.groups.values():
            if group.state is UNSHARDING:
                raise ScheduleError(
                    f"{group} was gathered but nothing waited for it: its layers were not run by their forward (a "
                    "replayed CUDA graph, a module put in their place?)"
                )
        self._drop_all()
        self.iterations += 1
        if self.checks is not None:
            self.checks.end_iteration(self.iterations, self.peak_bytes, self._num_microbatches)
        self._release()
        self._ended = True

    def _release(self) -> None:
        start = time.perf_counter_ns()
        for part in self.parts:
            part.release(self.iterations)
        self.recorder.add("issue", "end of publishing", start, time.perf_counter_ns())

    def params_updated(self, by_optimizer: bool = True) -> None:
        """Publish the shards, which have new values, and issue the gathers of the next iteration's start."""
        self._watch_reads(False)
        start = time.perf_counter_ns()
        self._drop_all()
        self.clock.version += 1
        by_optimizer = by_optimizer and not (self._delayed is not None and self._delayed.unknown)
        for part in self.parts:
            part.updated(self.iterations, by_optimizer)
        self.recorder.add("issue", "publish", start, time.perf_counter_ns())
        self.start()
        self._undisturbed, self.busy = True, False
        self._watch_reads(True)

    def step_skipped(self) -> None:
        """The optimizer has skipped its step."""
        self._watch_reads(False)
        self.busy = False
        for part in self.parts:
            part.skipped()
        self.apply_pending()
        self._watch_reads(True)

    def _watch_reads(self, watch: bool) -> None:
        if self.reads is not None:
            self.reads.open() if watch else self.reads.close()

    def apply_pending(self) -> None:
        """Apply the delayed update between two iterations, if there is one. Collective."""
        if self._delayed is not None and self._delayed.pending:
            self._end_reads()
            self._delayed.apply()
            self.params_updated()

    def _end_reads(self) -> None:
        """Drop all whole copies, and wait until no rank reads what was published. This counts as an iteration, so that
        no rank overwrites copies that a slower rank still gathers from."""
        self._drop_all()
        self.iterations += 1
        self._release()

    def params_changed(self) -> None:
        """Whole parameters have new values that the optimizer did not write: take the shards
        from them, and go on as after an optimizer step. Collective."""
        self._watch_reads(False)
        for part in self.parts:
            part.changed()
        for group in self.groups.values():
            group.adopt()
        self._end_reads()
        self.params_updated(by_optimizer=False)

    # Called from outside training steps.

    def sync_parameters(self) -> None:
        """Megatron is about to read parameters: for evaluation, checkpoints or hashes. If not all parameters fit whole
        at once, the reader brings them (:meth:`read`); otherwise :meth:`unshard_all`."""
        if self.in_turn is None:
            self.unshard_all()
        else:
            self.read(())

    def read(self, wanted: Collection[int]) -> None:
        """Make the groups ``wanted`` whole and fresh, and no others; only if :attr:`in_turn` is not None. Collective.

        Raises:
            ScheduleError: called within an iteration, or the groups need more bytes than there is room for.
        """
        assert self.in_turn is not None
        if not self._ended:
            raise ScheduleError("parameters are read within a training iteration, where the schedule frees them")
        self.busy = False  # if Megatron's rerun machinery ends a run, no update of parameters follows
        self.in_turn.check_room(wanted)
        self._leave_program() if self._undisturbed else self._watch_reads(False)
        self.in_turn.bring(wanted, adopt=True)
        self._watch_reads(True)

    def evaluation(self) -> InTurn | None:
        """The object that brings the groups of forwards without a backward; None: all groups are whole."""
        self.sync_parameters()
        self._watch_reads(False)
        return self.in_turn

    def _leave_program(self) -> None:
        """Code outside the program reads parameters next, and may change them: wait until shards are written."""
        self._watch_reads(False)
        for part in self.parts:
            part.skipped()
        self.apply_pending()
        self._watch_reads(False)  # applying a pending update has begun to watch
        for part in self.parts:
            part.settled()
        self._undisturbed = False

    def unshard_all(self) -> None:
        """Make every group whole and fresh, for evaluation, checkpoints, hashes or the end of training.

        The caller may change the parameters next, so this waits for shards that are still being written.
        Collective over the data-parallel group if anything has to be gathered: all its
        ranks must call it.
        """
        self._leave_program()
        self.busy = True
        with contextlib.nullcontext() if self.memory is None else self.memory.unused():
            for _, group in sorted(self.groups.items()):
                if group.state is SHARDED:
                    group.unshard(self.gather, self.clock)
                if group.state is UNSHARDING:
                    group.wait(self.clock)
        self.busy = False

    def let_go(self) -> None:
        """Parameters are not read any more: wait for running gathers, and begin no others. A pending delayed update
        is not applied."""
        for part in self.parts:
            part.skipped()
        self._drop_all()
        for part in self.parts:
            part.settled()

    def fill_memory(self, rehearsal: Callable[[], None]) -> str | None:
        """Take the memory of an iteration from the device, see :meth:`MemoryPool.fill`; before the first iteration."""
        self._drop_all()
        return None if self.memory is None else self.memory.fill(rehearsal)

    # For the watch, called from another thread.

    def progress(self) -> tuple[int, int, int, int] | None:
        """A value that changes with every step that begins or ends. None outside training iterations, for example
        during an evaluation or while a checkpoint is written."""
        steps = (self._count_forward, self._count_backward)
        return (self.iterations, self.clock.version, *steps) if self.busy else None

    def where(self) -> str:
        """The iteration and the step that the training thread has reached, in words."""
        return (
            f"iteration {self.iterations + 1} of this schedule: {self._count_forward} of {len(self._forwards)} "
            f"forwards have begun and {self._count_backward} of {len(self._backwards)} backwards have ended"
        )

    def on_close(self, *functions: Callable[[], None]) -> None:
        """Call ``functions`` at the end, in reverse order."""
        self._close += functions

    def close(self) -> None:
        """End threads and unmap host memory."""
        self._watch_reads(False)
        for part in reversed(self.parts):
            part.close()
        while self._close:
            self._close.pop()()

    def _drop_all(self) -> None:
        """Invalidate all whole copies; wait for those that are still arriving."""
        for group in self.groups.values():
            if group.state is not SHARDED:
                group.drop()
        self.drop_staged()
        self._started = False
        self.residency.restart()

    def _out_of_order(self, kind: str, virtual_microbatch_id: int, model_chunk_id: int):
        raise ScheduleError(
            f"Megatron runs {kind} {virtual_microbatch_id} of chunk {model_chunk_id}, which the schedule does not "
            f"expect after {self._count_forward} forwards and {self._count_backward} backwards"
        )
