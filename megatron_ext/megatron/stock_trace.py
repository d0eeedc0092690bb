"""Record what Megatron itself does: steps, its own gathers, its optimizer.

It is only used if a trace is asked for. Scheduled and stock runs are recorded in the same way.
"""

from time import perf_counter_ns

from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.pipeline_parallel import schedules

from megatron_ext.formats.trace import END_NOT_KNOWN
from megatron_ext.runtime.recorder import Recorder


def record_steps(recorder: Recorder) -> None:
    """Record every forward and backward step as ``F`` and ``B`` on the compute lane."""
    for name, label in (("forward_step", "F"), ("backward_step", "B")):
        plain = getattr(schedules, name)
        plain = getattr(plain, "plain", plain)

        def step(*args, _plain=plain, _label=label, **kwargs):
            start = recorder.now()
            result = _plain(*args, **kwargs)
            recorder.add("compute", _label, start, recorder.now())
            return result

        step.plain = plain
        setattr(schedules, name, step)


class _RecordedBucketGroup(upstream._ParamAndGradBucketGroup):
    """Megatron's own gather: the training thread's time in it, and the transfer from its issue to its end."""

    recorder: Recorder
    _issued = 0
    _end_known = False

    def start_param_sync(self, *args, **kwargs):
        start, self._issued = perf_counter_ns(), self.recorder.now()
        super().start_param_sync(*args, **kwargs)
        self.recorder.add("issue", "unshard gpu", start, perf_counter_ns())
        handle = self.param_gather_handle
        self._end_known = handle is not None and self.recorder.add_end("gpu", "unshard", self._issued, handle)

    def finish_param_sync(self, *args, **kwargs):
        if not self.param_gather_dispatched:
            self.start_param_sync()
        if self.param_gather_handle is not None:
            start = self.recorder.now()
            self.param_gather_handle.wait()
            end = self.recorder.now()
            self.recorder.add("wait", "wait", start, end)
            if not self._end_known:
                self.recorder.add("gpu", END_NOT_KNOWN, self._issued, end)
        super().finish_param_sync(*args, **kwargs)


def record_gathers(ddp, recorder: Recorder) -> None:
    """Record the gathers of a chunk's bucket groups."""
    for bucket_group in [*ddp.bucket_groups, *getattr(ddp, "expert_parallel_bucket_groups", ())]:
        bucket_group.__class__ = _RecordedBucketGroup
        bucket_group.recorder = recorder
