"""The main job uses a cost table that lies there only where it holds; the job itself is replaced here."""

import os
import shutil
import subprocess
import sys

import msgspec
import pytest
import training
from places import HELPERS, ROOT
from planning_cases import WHOLE, make_table, make_workload
from warm_python import WarmPython

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.environment import world_sizes
from megatron_ext.runtime.machine import environment
from megatron_ext.workload import workload

COMMAND = """#!/usr/bin/env bash
echo "$1 $*" >> calls.log
case "$1" in
    cost) exec $WARM_PYTHON -m megatron_ext "$@" ;;
    describe) cp workload.json runs/again ;;
    measure) cp measured.json runs/again/cost_table.json ;;
    plan) echo '{}' > runs/again/schedule.json ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *device_sharing* | *REPEATABLE*) ;;
    *workload.measured_sizes*) echo 4096 4096 1024,4096 ;;
    *) echo "train $*" >> calls.log ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """A tree with the script, stand-ins for what it starts, and a run that was interrupted."""
    for name, text in {
        ".venv/bin/megatron-ext": COMMAND,
        ".venv/bin/python": PYTHON,
        "scripts/setup.sh": "#!/bin/sh\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copy(ROOT / "scripts" / "pretrain_gpt_hybrid.sh", tmp_path / "scripts")
    corpus = tmp_path / "runs" / "corpus" / "stdlib.idx"
    corpus.parent.mkdir(parents=True)
    corpus.touch()
    WarmPython.server(training.environment(), "torch")
    work = make_workload()
    workload.save(tmp_path / "workload.json", work)
    good = msgspec.structs.replace(
        make_table(work, **WHOLE), metadata=cost.Metadata(**environment(), world_sizes=world_sizes(work.parallel))
    )
    cost.save(tmp_path / "measured.json", good)

    def run(table=None, **settings) -> tuple[list[str], str]:
        """What was started, and what was said, by a run that finds ``table``."""
        folder = tmp_path / "runs" / "again"
        (tmp_path / "calls.log").unlink(missing_ok=True)
        subprocess.run(
            ["scripts/pretrain_gpt_hybrid.sh"], cwd=tmp_path, env=variables(), check=True, capture_output=True
        )  # writes its settings
        (folder / "old.metrics.json").write_text("{}")
        cost.save(folder / "cost_table.json", table or good)
        return again(**settings)

    def again(code: int = 0, **settings) -> tuple[list[str], str]:
        (tmp_path / "calls.log").unlink(missing_ok=True)
        done = subprocess.run(
            ["scripts/pretrain_gpt_hybrid.sh"], cwd=tmp_path, env=variables(**settings), capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        log = tmp_path / "calls.log"
        return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else [], done.stderr

    def variables(**settings) -> dict[str, str]:
        warm = f"{sys.executable} {HELPERS}/warm_python.py run {WarmPython.folder}"
        return os.environ | {"NAME": "again", "WARM_PYTHON": warm} | settings

    run.good, run.again, run.folder = good, again, tmp_path / "runs" / "again"
    return run


def elsewhere(table: cost.CostTable) -> cost.CostTable:
    hardware = table.metadata.hardware | {"processor": "another one"}
    return msgspec.structs.replace(table, metadata=msgspec.structs.replace(table.metadata, hardware=hardware))


def test_a_table_that_holds_is_used_again(job):
    calls, _ = job()
    assert calls[0] == "cost" and "measure" not in calls
    assert (job.folder / "old.metrics.json").exists()


def test_a_table_of_another_machine_is_said_and_measured_again(job):
    calls, said = job(elsewhere(job.good))
    assert calls[:3] == ["cost", "measure", "plan"]
    assert "hardware.processor: table another one, here" in said and "measuring again" in said
    assert not (job.folder / "old.metrics.json").exists()  # it was trained by the old plan
    assert cost.load(job.folder / "cost_table.json").metadata.hardware == job.good.metadata.hardware


def test_a_table_of_another_machine_is_used_where_that_is_allowed(job):
    calls, said = job(elsewhere(job.good), ALLOW_DIFFERENCES="1")
    assert "measure" not in calls and "hardware.processor: table another one, here" in said


def test_a_table_that_is_given_takes_the_place_of_measuring_and_what_a_run_taught_stays(job):
    calls, _ = job()
    calibrated = job.folder / "calibrated.cost_table.json"
    taught = msgspec.structs.replace(
        job.good, metadata=msgspec.structs.replace(job.good.metadata, notes=("calibrated by a run",))
    )
    cost.save(calibrated, taught)
    (job.folder / "report.md").touch()  # the run is complete: it is done again
    given = {"COST_TABLE": str(calibrated)}
    for settings, measured in (given, False), (given, False), ({}, True):
        calls, said = job.again(**settings)
        assert ("measure" in calls) == measured and not (job.folder / "report.md").exists()
        kept = cost.load(job.folder / "cost_table.json").metadata.notes
        assert (kept == taught.metadata.notes) != measured and calibrated.exists()
    assert "COST_TABLE = 'nowhere.json': no such file" in job.again(code=2, COST_TABLE="nowhere.json")[1]
