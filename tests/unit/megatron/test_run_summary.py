"""What a run says of itself at its start and end. Needs no process group."""

from planning_cases import make_workload

from megatron_ext.megatron import run_summary
from megatron_ext.megatron.run_summary import RunTimes, Sample
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.runtime.recorder import Recorder

MEASURED = RunTimes(10, 100e3, 20e3, 30e3)


def test_only_sampled_iterations_are_recorded_and_the_largest_rank_counts():
    recorder = Recorder(0, iterations=run_summary.SAMPLED)
    sample = Sample(recorder)
    wait = recorder.timed("wait", "wait 0", lambda: None)
    wait()  # before the first iteration
    for iteration in range(1, 15):
        recorder.begin_iteration()
        sample.begin_iteration(iteration, 4)
        wait()
    assert {event.iteration for event in recorder.events()} == set(run_summary.SAMPLED)
    assert set(sample.of_rank()) == set(run_summary.SAMPLED)
    slow = dict.fromkeys(run_summary.SAMPLED, (9000.0, 7000.0, 8000.0))
    assert run_summary.combine_ranks([sample.of_rank(), slow]) == RunTimes(len(slow), 9e3, 7e3, 8e3)
    assert run_summary.combine_ranks([{}, slow]) is None


def test_an_iteration_that_was_run_again_is_not_timed():
    sample = Sample(Recorder(0, iterations=run_summary.SAMPLED))
    for iteration in range(1, 8):
        sample.begin_iteration(iteration, 4)
    sample.run_again(4)
    assert set(sample.of_rank()) == {2, 3, 5, 6}


def test_the_end_says_what_was_gained_and_what_is_not_known():
    schedule = all_gpu(make_workload())
    alone = "\n".join(run_summary.end_lines(schedule, MEASURED, None, reference=False))
    assert "exposed 20.000 ms" in alone and "not measured: the time" in alone and "gained" not in alone
    slower = RunTimes(10, 130e3, 45e3, 60e3)
    compared = "\n".join(run_summary.end_lines(schedule, MEASURED, slower, reference=False))
    assert "gained in an iteration: 25.000 ms of exposed time, 30.000 ms in all" in compared
    assert "nothing measured" in run_summary.end_lines(schedule, None, None, reference=False)[0]


def test_the_start_names_schedule_routes_prediction_and_trace():
    lines = "\n".join(run_summary.start_lines(all_gpu(make_workload()), "s.json", "t.json", reference=False))
    for part in ("gathers by s.json", "groups)", "all ranks of a pipeline: gpu", "predicted: ", "trace: t.json"):
        assert part in lines


def test_at_zero_stage_3_the_start_says_what_evaluation_needs():
    schedule = all_gpu(make_workload(zero_stage=3))
    (line,) = [
        line for line in run_summary.start_lines(schedule, "s", None, reference=False) if "whole parameters" in line
    ]
    whole = [0] * len(schedule.ranks)
    for group in schedule.groups:
        whole[group.pp_rank] += group.bytes
    assert line.endswith(f"bring all of them, up to {max(whole) / 2**20:.1f} MiB")


def test_the_end_says_how_many_steps_were_made_twice():
    assert run_summary.early_lines(12, 0) == []
    (line,) = run_summary.early_lines(12, 8)
    assert "8 of 12 were taken back" in line and "without rollback_bytes" in line
