"""Planning that fails is no lack of memory."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import timed_plans
from timed_rows import TIMINGS

from megatron_ext.formats.errors import InputError

NUMBERS = [number for number, row in enumerate(TIMINGS) if row.planned and not row.spare]
SHORT = InputError("cannot fit: pipeline rank 0 holds at least 9 bytes on its device, 1 bytes short")


@pytest.mark.parametrize(
    "error, code", [(None, 0), (SHORT, 0), (InputError("no such option"), 1), (RuntimeError("exit code 1"), 1)]
)
def test_a_row_may_be_refused_for_lack_of_memory_alone(monkeypatch, tmp_path, error, code):
    def plan(folder, number, **how):
        if error is not None and number == NUMBERS[-1]:
            raise error

    monkeypatch.setattr(timed_plans, "plan", plan)
    monkeypatch.setattr(timed_plans, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(sys, "argv", ["timed_plans.py", str(tmp_path)])
    assert timed_plans.plan_all() == code
    assert [path.read_text() for path in tmp_path.glob("*.refused")] == ([] if error is None else [str(error)])


@pytest.mark.parametrize("spare", [False, True])
def test_one_failure_among_many_is_seen(monkeypatch, tmp_path, spare):
    monkeypatch.setattr(timed_plans, "try_plan", lambda folder, number, *how: number % 2 == 0)
    monkeypatch.setattr(timed_plans, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(sys, "argv", ["timed_plans.py", str(tmp_path), *(["--spare"] if spare else [])])
    rows = [number for number, row in enumerate(TIMINGS) if row.planned and row.spare is spare]
    assert timed_plans.plan_all() == int(any(number % 2 for number in rows))


def test_a_failing_command_is_told_from_bad_input_and_says_why(capsys):
    with pytest.raises(InputError, match="show: exit code 2: .*no-such.json"):
        timed_plans.call("show", "no-such.json")
    assert "no-such.json" in capsys.readouterr().err


def test_an_internal_failure_is_no_refusal(monkeypatch):
    monkeypatch.setattr(timed_plans.main, "main", lambda words: 1)
    with pytest.raises(RuntimeError, match="plan: exit code 1"):
        timed_plans.call("plan")


def test_as_many_processes_plan_as_a_container_has_processors(monkeypatch, tmp_path):
    asked = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, number):
            asked.append(number)
            super().__init__(number)

    monkeypatch.setattr(timed_plans, "plan", lambda *words, **how: None)
    monkeypatch.setattr(timed_plans, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(timed_plans.host_threads, "processors", lambda: 3)
    monkeypatch.setattr(sys, "argv", ["timed_plans.py", str(tmp_path), "--spare"])
    assert timed_plans.plan_all() == 0 and asked == [1]
