"""The host's optimizer steps beside the next iteration: delayed parameter update.

[Note: Delayed parameter update]
w[t+1] = w[t] - f(gradient at w[t-1]): the step on the gradient of one iteration is made while the next iteration
computes, and its parameters are used from the iteration after that on. The training thread reduces, checks and clips
gradients as ever and copies them to the host. A thread makes the step and leaves the new parameters in staging
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

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.worker import Transfer, Worker


class DelayedUpdate:
    """Makes the steps of one rank beside the next iteration, see the note above.

    Args:
        staged: ``(staging, shard)`` of every parameter: a step writes the staging tensor, in host memory and of the
            shard's shape and dtype; the shard gets its values when the update is applied.
        begun: training iterations that have ended before this run.
        after: updates of so many first iterations are not delayed.
        published: called before a step changes parameters on the host: returns when what is published of the update
            before no longer reads them; None where nothing is published.
        device: see :mod:`megatron_ext.runtime.device`.
        rank: injected delays differ by it.
        recorder: where steps are recorded, or None.
    """

    def __init__(
        self,
        staged: list[tuple[torch.Tensor, torch.Tensor]],
        begun: int,
        after: int,
        published: Callable[[], None] | None,
        device,
        faults: Faults,
        rank: int,
        recorder=None,
    ):
        self.staged, self.applied = staged, 0
        self._iteration, self._after = begun, after
        self._published, self._device, self._recorder = published, device, recorder
        self._delay = faults.delayer(faults.step_delay_ms, salt=131 + rank)
        self._undelayed, self._lost = bool(faults.undelayed), faults.lose_update
        self._worker, self._stream = Worker("delayed-update"), device.copy_stream()
        self._steps: list[Callable[[], None]] = []
        self._job: Transfer | None = None
        self._handed_over = 0

    def begin(self) -> None:
        """A training iteration begins."""
        self._iteration += 1

    @property
    def delays(self) -> bool:
        """Whether the update of the iteration that began last is delayed."""
        return self._iteration > self._after and not self._undelayed

    @property
    def pending(self) -> bool:
        """Whether an update is handed over and not applied."""
        return self._job is not None

    def take(self, step: Callable[[], None]) -> None:
        """Make ``step`` with the next :meth:`hand_over`. Its gradients are queued for host memory on the current
        stream."""
        self._steps.append(step)

    def hand_over(self) -> None:
        """Let the thread make the steps that were taken, if any."""
        if self._steps:
            assert self._job is None
            steps, self._steps = self._steps, []
            self._handed_over += 1
            if self._handed_over == self._lost:
                steps = []
            self._job = self._worker.submit(partial(self._step, steps, self._device.mark()))

    @torch.no_grad()
    def apply(self) -> None:
        """Wait for the pending update, if there is one, and give the shards its values."""
        if self._job is None:
            return
        begin = perf_counter_ns()
        self._job.wait()
        self._job = None
        waited = perf_counter_ns()
        if any(shard.device.type == "cpu" for _, shard in self.staged):
            self._device.settle()  # what is queued may still read shards in host memory
        for staging, shard in self.staged:
            shard.copy_(staging, non_blocking=True)
        self.applied += 1
        if self._recorder is not None:
            self._recorder.add("issue", "wait for the delayed update", begin, waited)
            self._recorder.add("issue", "apply the delayed update", waited, perf_counter_ns())

    def _step(self, steps: list[Callable[[], None]], after, transfer: Transfer) -> None:
        with torch.no_grad():
            # Gradients have arrived, and staging tensors are no longer read.
            self._device.synchronize(self._device.on_stream(lambda: None, self._stream, after))
            if self._published is not None:
                self._device.synchronize(self._device.on_stream(self._published, self._stream, None))
            if self._delay is not None:
                self._delay()
            begin = perf_counter_ns()
            for step in steps:
                self._device.synchronize(self._device.on_stream(step, self._stream, None))
        if self._recorder is not None:
            self._recorder.add("host_step", "delayed", begin, perf_counter_ns())
        if self._delay is not None:
            self._delay()

    def close(self) -> None:
        """End the thread, after the step in progress."""
        self._worker.close()
