"""Parts of planning that run in forked processes give what they give in one process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import in_processes as module
from megatron_ext.planner import plan, verdict
from megatron_ext.planner.in_processes import WORTH, in_processes
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

PROGRAM = """
import os, sys, time
from pathlib import Path
from megatron_ext.planner.in_processes import WORTH, in_processes

here, folder = os.getpid(), Path(sys.argv[1])
os.sched_getaffinity = lambda _: {0, 1}

def task():
    if os.getpid() != here:
        (folder / "written").touch()
        (folder / "written").rename(folder / "forked")
        return bytes(1 << 24)
    time.sleep(1000)

in_processes([task, task], WORTH)
"""


@pytest.fixture(autouse=True)
def three_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(module.threading, "active_count", lambda: 1)  # pytest's workers have threads that hold no lock


def _task(number: int) -> tuple[int, int]:
    if number == 3:
        raise InputError("does not fit", field="limits.host_bytes", value=number)
    return number, os.getpid()


def _results(count: int = 7, simulated: int = WORTH) -> list:
    return in_processes([partial(_task, number) for number in range(count)], simulated)


def test_tasks_are_divided_among_processors_and_results_keep_their_order():
    found = _results()
    refused = found.pop(3)
    assert isinstance(refused, InputError) and str(refused) == "limits.host_bytes = 3: does not fit"
    assert refused.field == "limits.host_bytes" and refused.value == 3
    assert [number for number, _ in found] == [0, 1, 2, 4, 5, 6]
    assert len({pid for _, pid in found}) == 3 and found[0][1] == os.getpid()


@pytest.mark.parametrize("device_bytes", [400_000, 600_000])
def test_a_plan_and_its_verdict_are_the_same_in_one_process(device_bytes, monkeypatch):
    work = make_workload(pp=1, vp=1, dp=4, order="no_pipeline", layers=6, microbatches=2, dtypes=("float32",))
    table = make_table(work, gpu=(20.0, 2e3), cpu=(10.0, 3e3), publish=(5.0, 5e3))
    table = replace(table, reduce=line(20.0, 1.5e3), host_add=line(1.0, 1e4))
    limits = Limits(device_bytes=device_bytes)
    work = replace(work, zero_stage=3, optimizer=OptimizerSettings(on_host=True), limits=limits)
    found, forked, start = [], [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forked.append(0) or start())
    for worth in (float("inf"), 0):
        monkeypatch.setattr(module, "WORTH", worth)
        schedule = plan(work, table)
        found.append((json_files.encode(schedule), verdict(work, table, schedule).figures, len(forked)))
    in_turn, divided = found
    assert divided[:2] == in_turn[:2] and in_turn[2] == 0 < divided[2]


def test_tasks_run_here_if_no_process_can_be_forked(monkeypatch):
    def refuse() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    assert in_processes([os.getpid] * 4, WORTH) == [os.getpid()] * 4


@pytest.mark.parametrize("why", ["little to do", "threads", "one processor", "no task"])
def test_nothing_is_forked(why, monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was forked"))
    if why == "threads":
        monkeypatch.setattr(threading, "active_count", lambda: 2)
    if why == "one processor":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    found = _results(0 if why == "no task" else 2, WORTH - 1 if why == "little to do" else WORTH)
    assert found == [(number, os.getpid()) for number in range(len(found))]


def test_the_tasks_of_a_killed_process_run_here():
    ours = os.getpid()

    def task(number: int) -> int:
        if os.getpid() != ours:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert in_processes([partial(task, number) for number in range(5)], WORTH) == [0, 1, 2, 3, 4]


def test_a_result_that_cannot_be_sent_is_a_defect():
    with pytest.raises(AssertionError, match="only a signal"):
        in_processes([lambda: threading.Lock()] * 2, WORTH)


def test_no_process_is_left_behind_when_a_task_here_fails():
    here = os.getpid()

    def fail_here() -> None:
        assert os.getpid() != here, "a defect"
        threading.Event().wait()  # until it is killed

    with pytest.raises(AssertionError, match="a defect"):
        in_processes([fail_here] * 3, WORTH)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_forked_processes_end_with_the_one_that_forked_them(number, tmp_path):
    """Even if they have more to send than a pipe holds."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, program, tmp_path], stdout=subprocess.PIPE) as process:
        forked = tmp_path / "forked"
        while not forked.exists():  # ends: the process writes it
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)  # until no process has its output open
    assert process.returncode == -number
