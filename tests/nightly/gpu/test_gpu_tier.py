"""``scripts/test_gpu.sh`` on a machine without a GPU: all cases in small, the report, and what a hang costs."""

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from places import ROOT
from training import environment as environment_with
from training import work_left

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
from case_table import FACTORS, KILL_AND_RESUME, TWO_RANKS, Training, jobs, possible
from covering import covering_rows, pairs
from gpu_report import machine_facts, new_report, table
from job_process import JobProcess
from job_runs import Place
from lanes import has_room
from run import lanes_of
from untried import untried

HUNG = jobs()[1].cases[2].name
TRAINED_BEFORE = jobs()[1].cases[1].name


def tier(*words: object, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", "scripts/test_gpu.sh", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment_with(environment), capture_output=True, text=True)


def results(out: Path) -> dict[str, dict]:
    return {result["case"]: result for result in json.loads(out.read_text())["results"]}


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "report.json"


@pytest.mark.parametrize("processors, lanes", [(64, 3), (16, 3), (8, 2), (2, 1)])
def test_so_many_jobs_run_at_once_as_processors_are_enough_for(processors, lanes):
    assert lanes_of(processors) == lanes


def test_a_fact_that_cannot_be_had_is_said_and_ends_nothing(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility:\nfound another")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert machine_facts({}, ROOT, None, {})["packages"]["cudnn"] == "cuDNN version incompatibility: found another"


def place_with(gigabytes: int) -> Place:
    """Of a machine with a drive, Transformer Engine and a device of so many GB."""
    of_machine = {"work": ROOT, "drive": ROOT, "no_drive": "", "dry_run": False, "engine": True, "processors": 16}
    return Place(**of_machine, lanes=3, hang="", device="a card", device_bytes=gigabytes * 10**9)


IN_A_CONTAINER = place_with(150)._replace(shared_bytes=64 << 20)


@pytest.mark.parametrize(("gigabytes", "kinds"), [(150, ""), (85, ""), (42, "d"), (25, "d2s")])
def test_what_the_device_has_no_memory_for_is_not_tried_and_said(gigabytes, kinds):
    """Of 1B parameters states on the device and two ranks; of 1.6B stock Megatron."""
    names = {"d": jobs()[1].cases[0].name, "2": jobs()[2].cases[0].name, "s": "timing: stock, all on the device"}
    cases = [case for job in jobs() for case in job.cases if not job.spare]
    report = new_report(ROOT, {}, [(case.name, False) for case in cases], dry_run=False, budget=1.0)
    short = []
    for case in cases:
        result = untried(case, place_with(gigabytes))
        if result is not None and "GB of device memory, a card has" in result.said:
            assert result.status == "could not try" and result.said.startswith("not run: needs ")
            report = report.with_result(result)
            short.append(case.name)
    assert short == [names[kind] for kind in kinds]
    assert (f"({len(short)} for lack of device memory)" in table(report).splitlines()[-1]) == bool(short)


def test_ranks_that_nccl_has_no_shared_memory_for_are_not_tried():
    cases = [case for job in jobs() for case in job.cases]
    found = {case.name for case in cases if "/dev/shm has 64 MiB" in getattr(untried(case, IN_A_CONTAINER), "said", "")}
    several = {case.name for case in cases if isinstance(case, Training) and case.layout != "1 rank"}
    assert found == several | {KILL_AND_RESUME} | {case.name for case in cases if case.name.endswith(TWO_RANKS)}
    assert len(several) > 20


def test_stacks_take_no_longer_than_is_left(tmp_path, monkeypatch):
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ranks = "import os, time; os.fork(); os.fork(); time.sleep(60)"
    process = JobProcess([sys.executable, "-c", ranks], dict(os.environ), tmp_path, tmp_path / "log")
    while len(process.members()) < 4:
        time.sleep(0.05)
    begun = time.monotonic()
    stacks = process.stacks(1.0)
    process.kill()
    assert time.monotonic() - begun < 10 and stacks.count("most recent call first") == 4, stacks


def test_jobs_run_beside_each_other_as_far_as_the_device_has_memory():
    large, shared = jobs()[1:3]
    running = [SimpleNamespace(left=large.cases)]
    assert not has_room(place_with(80), running, shared.cases) and has_room(place_with(85), running, shared.cases)
    assert has_room(place_with(24), [], shared.cases)  # what may not fit alone is another question
    assert has_room(place_with(80)._replace(device_bytes=None), running, shared.cases)


@pytest.mark.timeout(2700)
def test_a_case_that_hangs_costs_its_own_line_only(megatron_tree, out):
    first = tier("--dry-run", "--out", out, "--hang", HUNG)
    assert first.returncode == 1, first.stderr[-3000:]
    found = results(out)
    assert [*found] == [case.name for job in jobs() for case in job.cases]
    hung = found.pop(HUNG)
    assert hung["status"] == "HUNG" and "no end after 10 s" in hung["said"]
    assert "Current thread" in hung["stacks"] and "train_ranks.py" in hung["stacks"]
    absent = {name for name in found if "DeepSpeed" in name and importlib.util.find_spec("deepspeed") is None}
    assert {name for name, result in found.items() if result["status"] != "pass"} == absent, first.stdout
    assert not [result for result in found.values() if "stand-in" in result.get("said", "")]
    assert f"{len(found) - len(absent)} pass, 1 HUNG" in first.stdout and HUNG in first.stdout
    assert [path.name for path in out.parent.iterdir()] == [out.name] and work_left(out.parent) == []

    begun = time.monotonic()
    again = tier("--dry-run", "--out", out, "--resume")
    assert again.returncode == 1 and "begins" not in again.stdout, again.stdout
    assert results(out) == found | {HUNG: hung} and time.monotonic() - begun < 60


@pytest.mark.timeout(300)
def test_what_found_no_time_is_listed_and_resumed(megatron_tree, out):
    only = ["--dry-run", "--out", out, "--only", "large, 1 rank"]
    first = tier(*only, "--budget", "50", "--spent", "20")  # a case is not begun that may take 35 s
    assert first.returncode == 1 and "NOT RUN" in first.stdout, first.stdout
    assert results(out)[TRAINED_BEFORE]["status"] == "NOT RUN"
    again = tier(*only, "--resume")
    assert again.returncode == 0, again.stdout
    assert {result["status"] for result in results(out).values()} == {"pass"}


def test_training_that_differs_is_seen(megatron_tree, out):
    result = tier("--dry-run", "--out", out, "--only", TRAINED_BEFORE, MEGATRON_EXT_FAULTS="stale_group=0")
    assert result.returncode == 1, result.stdout
    (found,) = results(out).values()
    assert found["status"] == "FAIL" and "run 1: NOT EQUAL: losses of iteration 2" in found["said"]


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "torch sees no CUDA device here; --dry-run needs none"),
        (["--dry-run", "--only", "no such case"], "--only = 'no such case': no case has such a name"),
        (["--dry-run", "--drive", "/no/such/place"], "--drive = '/no/such/place': is no directory"),
    ],
)
def test_bad_input_is_one_line(megatron_tree, out, words, said):
    result = tier("--out", out, *words)
    assert result.returncode == 2 and said in result.stderr.splitlines()[-1] and not out.exists(), result.stderr


def test_every_two_values_that_go_together_meet():
    rows = covering_rows(FACTORS, possible, lambda row: 1.0)
    products = (dict(zip(FACTORS, values)) for values in itertools.product(*FACTORS.values()))
    wanted = {pair for row in products if possible(row) for pair in pairs(row)}
    assert {pair for row in rows for pair in pairs(row)} == wanted and all(map(possible, rows))
    assert len(rows) < 40


STAND_IN = """#!/bin/sh
# The interpreter of .venv: PyTorch is for CUDA 12, cuda-bindings is not there and cannot be installed.
echo "$*" >> "{log}"
case "$*" in
    *"-m pip"*) exit 1 ;;
    *"import cuda.bindings"*) exit 1 ;;
    *'["cuda"]'*) echo 12 ;;
    *sysconfig*) echo "{folder}" ;;
esac
"""


def test_the_set_up_tries_again_to_install_cuda_bindings(tmp_path):
    log, interpreter = tmp_path / "log", tmp_path / ".venv" / "bin" / "python"
    names = ("pyproject.toml", "setup.py", "constraints.txt")
    for name in (*names, "scripts/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(STAND_IN.format(log=log, folder=tmp_path))
    pins = hashlib.sha256(b"".join((tmp_path / name).read_bytes() for name in names)).hexdigest()
    (tmp_path / ".venv" / ".megatron_ext_stamp").write_text(f"{pins} core\n")
    for path in (interpreter, tmp_path / "scripts" / "setup.sh"):
        path.chmod(0o755)
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "cuda-bindings could not be installed" in done.stderr, done.stderr
    assert "pip install --quiet --retries 0 --timeout 5 cuda-bindings==12.*" in log.read_text()
