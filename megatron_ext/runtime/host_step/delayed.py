"""The host's optimizer steps beside the next iteration: delayed parameter update.

[Note: Delayed parameter update]
w[t+1] = w[t] - f(gradient at w[t-1]): the step on the gradient of one iteration is made while the next iteration
computes, and its parameters are used from the iteration after that on. The training thread reduces, checks and clips
gradients as ever and queues their copies to the host. A thread makes the step and leaves the new parameters in staging
tensors. At the end of the next iteration the training thread waits for that step and copies the staging tensors to the
shards, before it hands over the next gradients. An iteration whose step is skipped hands nothing over; the update that
is pending is applied all the same.

Whatever needs parameters between two iterations (evaluation, a checkpoint, a hash, the end of training) has the pending
update applied first. The iteration that follows then computes with all updates so far, and its own is delayed again.
Source: ZeRO-Offload (arXiv 2101.06840), section 5.2, one-step delayed parameter update. The rule is the one of
PipeDream-2BW (arXiv 2006.09503).
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch

from megatron_ext.formats.moved_bytes import Row
from megatron_ext.runtime.flags import poll, private_flags
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.publisher import Publisher
from megatron_ext.runtime.worker import Transfer, Worker


class DelayedUpdate(Part):
    """Makes the steps of one rank beside the next iteration, see the note above.

    Args:
        staged: ``(staging, shard)`` of every parameter: a step writes the staging tensor, in host memory and of the
            shard's shape and dtype; the shard gets its values when the update is applied.
        begun: training iterations that have ended before this run.
        after: updates of so many first iterations are not delayed.
        publisher: what it publishes of the update before is read before a step changes it; None: nothing is published.
        device: see :mod:`megatron_ext.runtime.device`.
        rank: injected delays differ by it.
        recorder: where steps are recorded, or None.

    Attributes:
        rows: what :meth:`write_shards` moves.
    """

    def __init__(
        self,
        staged: list[tuple[torch.Tensor, torch.Tensor]],
        begun: int,
        after: int,
        publisher: Publisher | None,
        device,
        issuer: Issuer,
        recorder=None,
    ):
        self.staged, self.applied = staged, 0
        self.rows: list[Row] = []
        self._iteration, self._after = begun, after
        self._publisher, self._device, self._issuer, self._recorder = publisher, device, issuer, recorder
        self._worker, self._copied = Worker("delayed-update"), device.event()
        (self._arrived,) = private_flags(1, device)
        self._steps: list[Callable[[], None]] = []
        self._job: Transfer | None = None
        self._handed_over, self._counted = 0, False
        self._on_host = device.kind == "cuda" and any(shard.device.type == "cpu" for _, shard in staged)

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
        """Whether an update is handed over and not applied."""
        return self._job is not None

    def take(self, step: Callable[[], None]) -> None:
        """Make ``step``, which needs host memory alone, when the shards are published. The copies of its gradients to
        host memory are queued on the compute stream."""
        self._steps.append(step)

    def updated(self, iterations: int, by_optimizer: bool) -> None:
        """Let the thread make the steps that were taken, if any."""
        self._counted = False
        if self._steps:
            assert self._job is None
            steps, self._steps = self._steps, []
            self._handed_over += 1
            self._device.compute.store(self._arrived, self._handed_over)  # staging tensors are no longer read, either
            self._job = self._worker.submit(partial(self._step, steps, self._handed_over))

    @torch.no_grad()
    def apply(self) -> None:
        """Wait for the pending update, if there is one, and give the shards its values."""
        if self._job is None:
            return
        begin = perf_counter_ns()
        self._issuer.join(self._job)
        self._job = None
        waited = perf_counter_ns()
        self.write_shards()
        self.applied += 1
        if self._recorder is not None:
            self._recorder.add("issue", "wait for the delayed update", begin, waited)
            self._recorder.add("issue", "apply the delayed update", waited, perf_counter_ns())

    @torch.no_grad()
    def write_shards(self) -> None:
        """Give the shards the values of the staging tensors."""
        if self._on_host:  # what is queued may still read shards in host memory
            self._device.synchronize(self._device.compute.record(self._copied))
        for staging, shard in self.staged:
            shard.copy_(staging, non_blocking=True)
        if self._recorder is not None:
            for row in self.rows:
                self._recorder.moved(*row)

    def _step(self, steps: list[Callable[[], None]], number: int, transfer: Transfer) -> None:
        """On the thread."""
        poll(partial(self._arrived.reached, number))
        if self._publisher is not None:
            self._publisher.wait_on_thread()
        begin = perf_counter_ns()
        with torch.no_grad():
            for step in steps:
                step()
        if self._recorder is not None:
            self._recorder.add("host_step", "delayed", begin, perf_counter_ns())

    def changed(self) -> None:
        if self.pending:
            raise ScheduleError(
                "parameters were changed while a delayed update is pending: call "
                "megatron_ext.megatron.hooks.unshard_all() on all ranks before they are changed"
            )

    def close(self) -> None:
        """End the thread, after the step in progress."""
        self._worker.close()
