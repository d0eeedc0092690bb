"""The host's optimizer steps during the next iteration: delayed parameter update.

[Note: Delayed parameter update]
w[t+1] = w[t] - f(gradient at w[t-1]): the step on the gradient of one iteration is made while the next iteration
computes, and its parameters are used from the iteration after that on. The training thread reduces, checks and clips
gradients as usual and queues their copies to rooms (room.py), one room per unit. A thread makes the step and puts the
new parameters where the gradients were. At the end of the next iteration the training thread waits for that step and
copies the parameters from the rooms to the shards, before the next gradients arrive. An iteration whose step is skipped
submits no step; the pending update is applied all the same.

If parameters are needed between two iterations (evaluation, a checkpoint, a hash, the end of training), the pending
update is applied first. The iteration that follows then computes with all updates so far, and its own is delayed again.
Source: ZeRO-Offload (arXiv 2101.06840), section 5.2, one-step delayed parameter update. The rule is that of
PipeDream-2BW (arXiv 2006.09503).
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch

from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.host_step.room import StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.publisher import Publisher
from megatron_ext.runtime.worker import Transfer, Worker


class DelayedUpdate(Part):
    """Makes the steps of one rank during the next iteration, see the note above.

    Args:
        link: the streams that all units' rooms use.
        begun: training iterations that ended before this run.
        after: the updates of the first ``after`` iterations are not delayed.
        publisher: has read the previous update before a step changes it; None: nothing is published.
    """

    def __init__(self, link: StepStreams, begun: int, after: int, publisher: Publisher | None, issuer: Issuer):
        self.applied, self._changed_at = 0, -1
        self._iteration, self._after = begun, after
        self._publisher, self._link, self._issuer = publisher, link, issuer
        self._worker, self._computed = Worker("delayed-update"), link.device.event()
        self._taken: list[tuple[list[HostUnit], Callable[[], None]]] = []
        self._pending: list[HostUnit] = []  # units of the job
        self._job: Transfer | None = None
        self._counted = False

    def begin(self) -> None:
        self._iteration += not self._counted  # Megatron's rerun machinery may run an iteration again
        self._counted = True

    def skipped(self) -> None:
        self._counted = False

    @property
    def delays(self) -> bool:
        """Whether the update of the iteration that began last is delayed."""
        return self._iteration > self._after

    @property
    def pending(self) -> bool:
        """Whether an update has been submitted and is not applied yet."""
        return self._job is not None

    @property
    def unknown(self) -> bool:
        """Whether the shards were changed by something other than the optimizer, and no update was applied since."""
        return self.delays and self._changed_at == self.applied

    def take(self, units: list[HostUnit], stepped: Callable[[], None] = lambda: None) -> None:
        """Step ``units``, which have a room each, when the shards are published. Their gradients are final when the
        compute stream has done what it has been given. The thread calls ``stepped`` after the steps."""
        self._link.device.compute.record(self._computed)
        if any(piece.gradient_on_host for unit in units for piece in unit.pieces):
            # The CPU copies these into rooms from which parameters of the previous update may still be leaving.
            self._link.left.synchronize()
        for unit in units:
            unit.arrive([self._computed], [piece.gradient() for piece in unit.pieces])
            unit.begin()  # now, because the next iteration changes gradients in host memory
        self._link.wait_for_arrivals()  # the next iteration changes gradients on the device as well
        self._taken.append((units, stepped))

    def updated(self, iterations: int, by_optimizer: bool) -> None:
        """Let the thread make the submitted steps, if any."""
        self._counted = False
        if self._taken:
            assert self._job is None
            taken, self._taken = self._taken, []
            self._pending = [unit for units, _ in taken for unit in units]
            self._job = self._worker.submit(partial(self._step, taken))

    @torch.no_grad()
    def apply(self) -> None:
        """Wait for the pending update, if there is one, and write it to the shards."""
        if self._job is None:
            return
        begin = perf_counter_ns()
        self._issuer.join(self._job)
        self._job, link = None, self._link
        waited = perf_counter_ns()
        link.leaving.wait(link.device.compute.record(self._computed))  # queued work may still read the shards
        if link.device.kind == "cuda" and any(piece.shard_on_host for unit in self._pending for piece in unit.pieces):
            self._computed.synchronize()
        for unit in self._pending:
            unit.leave()
        link.wait_for_leaves()
        self._pending = []
        self.applied += 1
        link.recorder.add("issue", "wait for the delayed update", begin, waited)
        link.recorder.add("issue", "apply the delayed update", waited, perf_counter_ns())

    def _step(self, taken: list[tuple[list[HostUnit], Callable[[], None]]], transfer: Transfer) -> None:
        """Runs on the thread."""
        for units, _ in taken:
            for unit in units:
                unit.wait_for_gradients()
        if self._publisher is not None:
            self._publisher.wait_on_thread()
        begin = perf_counter_ns()
        with torch.no_grad():
            for units, stepped in taken:
                for unit in units:
                    unit.optimizer.step()
                stepped()
        begin += sum(unit.read_ns for units, _ in taken for unit in units)
        self._link.recorder.add("host_step", "delayed", begin, perf_counter_ns())

    def changed(self) -> None:
        if self.pending:
            raise ScheduleError(
                "parameters were changed while a delayed update was pending: call "
                "megatron_ext.megatron.hooks.unshard_all() on all ranks before changing them"
            )
        self._changed_at = self.applied

    def close(self) -> None:
        """End the thread, after the step in progress."""
        self._worker.close()
