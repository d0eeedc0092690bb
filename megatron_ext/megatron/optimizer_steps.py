"""Optimizer steps of a run beside the updates that its hook has told of.

``hooks.on_params_updated`` is a line inside the optimizer. Where that line does not run although parameters change (a
step replayed as a CUDA graph does not, see torch's ``torch.cuda.graph``), the whole copies and host copies stay those
of the step before and training goes on with old parameters. So the results of ``optimizer.step()`` are counted as well.
"""

from collections.abc import Callable

from megatron_ext.runtime.group import ScheduleError


class OptimizerSteps:
    """Counts the successful steps of ``optimizer``, Megatron's optimizer of the run; ``skipped`` is called after every
    other."""

    def __init__(self, optimizer, skipped: Callable[[], None]):
        self.optimizer, self.taken, self.told, self._skipped = optimizer, 0, 0, skipped
        self._counting = None

    def watch(self) -> None:
        """Count from outside of whatever has been put around ``optimizer.step`` since the last call."""
        if self.optimizer.step is self._counting:
            return
        step = self.optimizer.step

        def counting(*args, **kwargs):
            result = step(*args, **kwargs)
            # A function that was wrapped since then no longer counts; its wrapper does.
            if counting is self._counting:
                if result[0]:  # (update_successful, grad_norm, num_zeros_in_grad)
                    self.taken += 1
                else:
                    self._skipped()
            return result

        self.optimizer.step = self._counting = counting

    def check(self) -> None:
        """Raise ScheduleError where parameters were updated and the schedule was not told."""
        if self.taken != self.told:
            raise ScheduleError(
                f"{self.taken} optimizer steps have changed parameters, but hooks.on_params_updated was called after "
                f"{self.told}: something replays or replaces the step of Megatron's distributed optimizer (a CUDA "
                "graph?)"
            )
