"""Count the steps of a run's optimizer from outside of all wrappers around it.

``hooks.on_params_updated`` is a line inside the optimizer. If that line does not run although parameters change (in a
step that is replayed as a CUDA graph, see ``torch.cuda.graph``), whole copies and host copies stay those of the step
before, and training continues with old parameters. So the results of ``optimizer.step()`` are counted as well.
"""

from collections.abc import Callable
from time import perf_counter_ns

from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.recorder import NOTHING, Recorder


class OptimizerSteps:
    """Counts the successful steps of ``optimizer``, Megatron's optimizer of the run.

    Args:
        after: called with the result of every step, ``(update_successful, grad_norm, num_zeros_in_grad)``.
        recorder: the recorder of steps.
    """

    def __init__(self, optimizer, *after: Callable[[tuple], None], recorder: Recorder = NOTHING):
        self.optimizer, self.taken, self.told, self._after = optimizer, 0, 0, after
        self._recorder, self._counting = recorder, None
        self.watch()

    def watch(self) -> None:
        """Count outside of all wrappers that were put around ``optimizer.step`` since the last call."""
        if self.optimizer.step is self._counting:
            return
        step = self.optimizer.step

        def counting(*args, **kwargs):
            start, issued_ns = self._recorder.now(), perf_counter_ns()
            result = step(*args, **kwargs)
            # A function that was wrapped since then no longer counts; its wrapper does.
            if counting is self._counting:
                self._recorder.add("optimizer", "step" if result[0] else "skipped step", start, self._recorder.now())
                if self._recorder.on_device:
                    self._recorder.add("launches", "steps", self._recorder.began_ns, issued_ns)
                self.taken += bool(result[0])
                for told in self._after:
                    told(result)
            return result

        self.optimizer.step = self._counting = counting

    def check(self) -> None:
        """Raise ScheduleError if parameters were updated without a call of ``hooks.on_params_updated``."""
        if self.taken != self.told:
            raise ScheduleError(
                f"{self.taken} optimizer steps have changed parameters, but hooks.on_params_updated was called for "
                f"{self.told} of them: other code replays or replaces the step of Megatron's distributed optimizer (a "
                "CUDA graph?)"
            )
