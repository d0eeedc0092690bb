"""Whatever ends a run, nothing of it is left: no process, nothing in /dev/shm, no half file."""

import contextlib
import os
import signal
import subprocess
import time

import pytest
from msgspec.structs import replace
from plans import describe, made_up_table, make_schedule
from training import ROOT, SMALL, environment, ranks_command, stays_in_shared_memory, work_left

from megatron_ext.cost.cost_table import Publish, Routes
from megatron_ext.launch.launcher import cause_of
from megatron_ext.planner import plan
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.workload.workload import Limits

TWO_RANKS = [*SMALL, "--data-parallel-size", "2"]


@pytest.fixture(scope="module")
def schedule_path(megatron_tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    return make_schedule(folder / "schedule.json", describe(folder / "workload.json", TWO_RANKS), "all-cpu")


@pytest.fixture(scope="module")
def staged_schedule_path(megatron_tree, tmp_path_factory):
    """Zero stage 3, partly from a drive: nothing of it may stay there."""
    folder = tmp_path_factory.mktemp("staged")
    workload = replace(describe(folder / "workload.json", TWO_RANKS), zero_stage=3, limits=Limits(nvme_slots=2))
    table = made_up_table()
    table = replace(
        table, routes=Routes(gpu=table.routes.gpu, nvme=table.routes.cpu), publish=Publish(nvme=table.publish.cpu)
    )
    schedule = plan(workload, table, policy="random:1")
    assert {to for entry in schedule.publish for to in entry.to} == {"nvme"}
    schedule_file.save(folder / "schedule.json", schedule)
    return folder / "schedule.json"


@pytest.fixture
def training(schedule_path, corpus_prefix, tmp_path):
    with caught_in_training(schedule_path, corpus_prefix, tmp_path) as process:
        yield process, tmp_path


@contextlib.contextmanager
def caught_in_training(schedule_path, corpus_prefix, tmp_path, *more: str):
    """A scheduled run that would take minutes, caught in the middle of training."""
    before = set(os.listdir("/dev/shm"))
    # The metrics path marks the run's processes.
    options = [*TWO_RANKS, "--data-path", corpus_prefix, "--train-iters", "100000", *more]
    options += ["--user-defined-schedule", schedule_path, "--user-defined-schedule-trace", tmp_path / "trace.json"]
    options += ["--metrics-path", tmp_path / "metrics.json"]
    command = ranks_command("examples/pretrain_gpt_hybrid.py", options, 2)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("iteration") and int(line.split()[1].partition("/")[0]) >= 3:
            break
    else:
        pytest.fail(process.stderr.read())
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
    assert not stays_in_shared_memory(before)
    assert list(tmp_path.iterdir()) == [], "no half-written file"


def ranks_of(process) -> list[int]:
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
        return [int(pid) for pid in children.read().split()[1:]]  # behind the launcher's guard


def nothing_left(marker) -> bool:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if not work_left(marker):
            return True
        time.sleep(0.2)
    return False


def test_a_killed_rank_ends_the_run_is_named_and_leaves_nothing_on_the_drive(
    staged_schedule_path, corpus_prefix, tmp_path
):
    drive = "--user-defined-schedule-nvme-path", str(tmp_path)
    with caught_in_training(staged_schedule_path, corpus_prefix, tmp_path, *drive) as process:
        victim = ranks_of(process)[1]
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 1 and any(f"process {victim}" in line for line in errors.splitlines()), errors
        assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    "codes, cause",
    [
        ([1, None, -9, 1], (2, -9)),
        ([1, 0, None, -11], (3, -11)),
        ([-6, -9, 1, 1], (1, -9)),
        ([None, 1, 1, None], (1, 1)),
        ([-15, 2, 2, 1], (1, 2)),
        ([3, 3, 1, None], (2, 1)),
        ([3, -11, 3, 3], (1, -11)),
        ([None, 3, 3, None], (1, 3)),
    ],
)
def test_the_rank_that_brought_the_others_down_is_named(codes, cause):
    assert cause_of(codes) == cause


@pytest.mark.nightly
def test_interrupt_ends_all_ranks(training):
    process, marker = training
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "SIGINT" in errors
    assert nothing_left(marker)


def test_a_killed_launcher_takes_its_ranks_along(training):
    process, marker = training
    assert len(ranks_of(process)) == 2
    process.kill()
    process.wait()
    assert nothing_left(marker)


@pytest.mark.nightly
def test_survivors_without_a_launcher_end_by_themselves(training):
    process, marker = training
    ranks = ranks_of(process)
    process.send_signal(signal.SIGSTOP)  # the launcher can end nobody now
    os.kill(ranks[1], signal.SIGKILL)
    deadline = time.monotonic() + 240
    alive = ranks
    while alive and time.monotonic() < deadline:
        time.sleep(0.2)
        alive = [pid for pid in ranks if _runs(pid)]
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=240)
    assert not alive, errors
    assert "another rank is gone" in errors, "the survivors say why they ended"


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
