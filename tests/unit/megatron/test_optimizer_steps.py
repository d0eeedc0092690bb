"""What is recorded of a run's optimizer steps."""

from time import perf_counter_ns, sleep
from types import SimpleNamespace

import pytest

from megatron_ext.megatron.optimizer_steps import OptimizerSteps
from megatron_ext.runtime.recorder import Recorder


class Clocked(Recorder):
    """On a device whose stream is where the clock is."""

    def now(self):
        return perf_counter_ns()

    def _add_base(self) -> None:
        pass


@pytest.mark.parametrize("on_device", [True, False])
def test_on_a_device_the_thread_s_time_until_the_step_is_recorded_once_an_iteration(on_device):
    """Also where something was put around the step."""

    def step():
        sleep(0.02)
        return True, 1.0, 0

    recorder, optimizer = Clocked(0, on_device), SimpleNamespace(step=step)
    steps = OptimizerSteps(optimizer, recorder=recorder)
    counted = optimizer.step
    optimizer.step = lambda: counted()
    steps.watch()
    for _ in range(2):
        recorder.begin_iteration()
        sleep(0.01)
        optimizer.step()
    launches = [event for event in recorder.events() if event.lane == "launches"]
    steps_us = [event for event in recorder.events() if event.lane == "optimizer"]
    assert [event.iteration for event in launches] == ([1, 2] if on_device else []) and len(steps_us) == 2
    for own, step_us in zip(launches, steps_us):
        assert own.duration_us >= 10e3 and own.end_us <= step_us.start_us + 100.0


def test_a_step_that_changed_nothing_is_recorded_as_skipped():
    """With fp16, where a gradient is not finite."""
    results = iter([(True, 1.0, 0), (False, None, None)])
    recorder, optimizer = Recorder(0), SimpleNamespace(step=lambda: next(results))
    OptimizerSteps(optimizer, recorder=recorder)
    for _ in range(2):
        optimizer.step()
    assert [event.name for event in recorder.events()] == ["step", "skipped step"]
