"""``megatron-ext doctor`` on a machine without a GPU: it runs, and says what it could not try."""

import contextlib
import json
import tempfile
from types import SimpleNamespace

import pytest
from variations import ALL
from warm_python import warm_children

from megatron_ext.cli import main as cli
from megatron_ext.doctor import finding, start_ranks
from megatron_ext.launch import launcher
from megatron_ext.measure import cluster_launch


@pytest.fixture
def doctor(megatron_tree, tmp_path, capfd):
    """``doctor(*options, before="")``: its exit code, findings and standard error; ranks run ``before`` first."""

    def doctor(*options, before: str = ""):
        words = ["--device", "cpu", "--out", tmp_path / "report.json", "--json"]  # a build for CUDA would miss a device
        with warm_children(launcher, before=before) if before else contextlib.nullcontext():
            code = cli.main(["doctor", *map(str, [*words, *options])])
        said = capfd.readouterr()
        found = json.loads(said.out) if said.out else {}
        if found:
            assert json.loads((tmp_path / "report.json").read_text())["findings"] == found["findings"]
        return code, found, said.err

    return doctor


FEW = """
from megatron_ext.doctor import training_check
training_check.CASES = training_check.CASES[5:7]
"""
"""One that needs a drive, and the one with everything on the host; tests/nightly trains the others, too."""


def test_everything_that_needs_no_gpu_passes(doctor):
    code, said, error = doctor("--nproc", 2, "--seconds", 450, before="" if ALL else FEW)
    assert code == 0 and said["failed"] is False, error
    status = {finding["check"]: finding["status"] for finding in said["findings"]}
    trained = [name for name in status if name.startswith("training")]
    assert [name for name in trained if status[name] != "pass"] == [
        "training: nvme, zero stage 3"
    ]  # no drive was given
    assert len(trained) == (9 if ALL else 2)
    assert status["process namespace"] == status["host pages"] == status["communicators"] == "pass"
    for name in ("pinning", "stream memory operations", "overlap: all-gather, compute", "cuda"):
        assert status[name] == "could not try"


FAULTS = """
import ctypes, os, signal, tempfile, time
from megatron_ext.doctor import direct_reads, overlap, stream_operations, training_check

def hang_in_the_driver(*arguments):
    ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock

def crash(*arguments):
    os.kill(os.getpid(), signal.SIGSEGV)

def sticky(*arguments):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

stream_operations.check, direct_reads.check, overlap.check = hang_in_the_driver, crash, sticky
save = training_check.user_defined_schedule.save

def hang(path, schedule):
    save(path, schedule)
    if schedule.zero_stage == 1 and "cpu" in schedule.routes:
        time.sleep(1000)

training_check.user_defined_schedule.save, training_check.CASES = hang, training_check.CASES[:3]
tempfile.tempdir = os.environ["TMPDIR"]  # found before, in the process that this one is a fork of
"""
"""What goes wrong in the ranks."""


def test_checks_that_hang_or_die_cost_their_own_line(doctor, monkeypatch, tmp_path):
    """And leave no files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    code, said, error = doctor("--nproc", 1, "--check-seconds", 20, "--seconds", 300, before=FAULTS)
    assert code == 1, error
    found = {finding["check"]: finding for finding in said["findings"]}
    failed = {name: finding for name, finding in found.items() if finding["status"] == "fail"}
    assert {*failed} == {"stream memory operations", "direct reads", "overlap", "training: cpu, zero stage 1"}
    assert "hang_in_the_driver" in failed["stream memory operations"]["found"]
    assert "Segmentation fault < crash" in failed["direct reads"]["found"]
    assert "illegal memory access" in failed["overlap"]["found"]
    hung = failed["training: cpu, zero stage 1"]
    assert "rank 0 in hang" in hung["found"] and "Thread" in hung["figures"]["stacks_of_rank_0"]
    for name in ("python", "host pages", "megatron-core", "training: gpu, zero stage 1", "training: gpu, zero stage 3"):
        assert found[name]["status"] == "pass", found[name]
    assert [*(tmp_path / "temporary").glob("megatron_ext.*")] == []


SLOW = """
import time
from megatron_ext.doctor import stream_operations
stream_operations.check = lambda *arguments: time.sleep(1000)
"""


@pytest.mark.nightly
def test_what_there_was_no_time_for_is_said(doctor):
    """It counts from when the ranks have met: they take longer than this to start."""
    _, said, error = doctor("--nproc", 1, "--seconds", 2, "--check-seconds", 1000, before=SLOW)
    found = [finding["found"] for finding in said["findings"]]
    assert "the 2 s for all checks were used up" in found and "not reached" not in found, error


def test_bad_input_is_one_line(tmp_path, capsys):
    for options, words in (
        (["--nvme", "/no/such/place"], "is not a directory"),
        (["--checkout", str(tmp_path)], "does not contain megatron/core"),
        (["--schedule", str(tmp_path / "none.json")], "cannot be read"),
        (["--out", str(tmp_path / "r.json"), "--device", "cuda"], "sees no CUDA device"),
        (["--out", str(tmp_path / "r.json"), "--device", "cuda", "--nproc", "1"], "sees no CUDA device"),
    ):
        assert cli.main(["doctor", *options]) == 2
        said = capsys.readouterr().err
        assert words in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_of_a_launcher_leave_without_waiting_for_their_groups(monkeypatch, tmp_path, rank):
    def leave(code):
        raise SystemExit(code)

    report = SimpleNamespace(failed=True, findings=())
    monkeypatch.setattr(start_ranks, "join", lambda options: report)
    monkeypatch.setattr(cluster_launch, "ends_all", contextlib.nullcontext)
    monkeypatch.setattr(start_ranks.os, "_exit", leave)
    monkeypatch.setattr(finding, "text", lambda report: "as found")
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": "2",
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "::1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["doctor", "--out", str(tmp_path / "r.json")])
