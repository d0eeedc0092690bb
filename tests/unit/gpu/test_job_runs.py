"""What is said of a job whose processes do not begin, do not end, or die."""

import json
from types import SimpleNamespace

import job_runs
import pytest
from case_table import jobs
from simulated_lanes import machine

TIMINGS = next(job for job in jobs() if job.name == "timings")
DOCTOR = next(job for job in jobs() if job.name == "doctor")


class Process:
    """A program of which the test says what it does; ``last``: the one that was started last."""

    last: "Process"

    def __init__(self, command, environment, cwd, log):
        self.code, self.killed = None, False
        Process.last = self

    def poll(self):
        return self.code

    def said(self, characters: int = 0) -> str:
        return "Error: it said so"

    def stacks(self, seconds: float) -> str:
        return "stacks"

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def begin(monkeypatch, tmp_path):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(job_runs, "JobProcess", Process)
    monkeypatch.setattr(job_runs, "time", SimpleNamespace(time=lambda: clock.now))

    def begin(job):
        run = job_runs.JobRun(job, machine(), tmp_path / "job", 2000.0, 2000.0)
        return run, clock, lambda **event: _tell(tmp_path / "job", event)

    return begin


def _tell(folder, event) -> None:
    with open(folder / "progress.jsonl", "a") as lines:
        lines.write(json.dumps(event) + "\n")


def test_a_slow_start_costs_one_case_and_the_others_are_not_run(begin):
    run, clock, _ = begin(TIMINGS)
    clock.now += 200  # libraries of a network's file system
    assert run.poll() == [] and not run.over
    clock.now += 200
    (result,) = run.poll()
    assert (result.status, result.case) == ("HUNG", TIMINGS.cases[0].name) and "before it began" in result.said
    assert run.over and not run.interrupted and run.left == [*TIMINGS.cases[1:]]


def test_a_timing_that_dies_leaves_the_others_to_new_processes(begin):
    run, _, tell = begin(TIMINGS)
    tell(begun=TIMINGS.cases[0].name, at=1000.0)
    assert run.poll() == []
    Process.last.code = -9
    (result,) = run.poll()
    assert (result.status, result.case) == ("DIED", TIMINGS.cases[0].name) and "exit code -9" in result.said
    assert run.over and run.interrupted and run.left == [*TIMINGS.cases[1:]]


def test_a_program_by_itself_fails_by_its_exit_code(begin):
    run, _, _ = begin(DOCTOR)
    Process.last.code = 1
    (result,) = run.poll()
    assert result.status == "FAIL" and result.said == "Error: it said so" and run.left == []


def test_processes_that_do_not_end_after_their_cases_are_ended(begin):
    run, clock, tell = begin(TIMINGS)
    for case in TIMINGS.cases:
        tell(begun=case.name, at=1000.0)
        tell(ended=case.name, status="pass", said="", figures={})
    assert [result.status for result in run.poll()] == ["pass"] * len(TIMINGS.cases)
    clock.now += 100
    assert run.poll() == [] and run.over and Process.last.killed
