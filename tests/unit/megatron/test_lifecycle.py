"""States of a run. Needs no process group."""

import pytest
from planning_cases import make_workload

from megatron_ext.megatron import lifecycle
from megatron_ext.megatron.lifecycle import Run, State
from megatron_ext.megatron.step_calls import IDLE
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.schedule import user_defined_schedule


@pytest.fixture
def schedule_path(tmp_path):
    path = tmp_path / "schedule.json"
    user_defined_schedule.save(path, all_gpu(make_workload()))
    return path


def test_a_run_without_a_schedule_leaves_megatron_alone_and_ends_once():
    run = Run(None, None)
    assert run.state is State.UNSCHEDULED
    assert run.begin_iteration(4, forward_only=False) is IDLE and run.peak_bytes() == 0
    run.finish()
    assert run.state is State.CLOSED
    with pytest.raises(AssertionError, match="closed cannot become closed"):
        run.finish()


def test_a_trace_that_cannot_be_written_costs_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(lifecycle, "gather_objects", lambda value: [value])
    monkeypatch.setattr(lifecycle.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(lifecycle.stock_trace, "record_steps", lambda recorder: None)
    run = Run(None, tmp_path / "trace.json")
    (tmp_path / "trace.json").mkdir()  # while it trains
    run.finish()
    assert run.state is State.CLOSED
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        line == f"megatron-ext: there is no trace of this run: {tmp_path}/trace.json: cannot be written: is a directory"
    )


def test_no_iteration_is_trained_before_the_setup(schedule_path):
    run = Run(schedule_path, None)
    assert run.state is State.BUILDING
    assert run.begin_iteration(4, forward_only=True) is IDLE
    with pytest.raises(ScheduleError, match="before .*on_train_setup was called"):
        run.begin_iteration(4, forward_only=False)
