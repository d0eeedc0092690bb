"""States on the drive, whatever ends a rank: every rank ends, nothing stays, and the last checkpoint goes on."""

import json
import os
from pathlib import Path

import pytest
from cases import model_options
from draw_schedule import on_drive
from drive_faults import FAULTS
from failing_run import OPTIONS, failing_run
from plans import describe

ENDS = [
    *(("0", "saving", number) for number in (0, 1, 2, 3, 4, 6, 8)),
    *(("1", "saving", number) for number in (0, 2, 5)),
    *(("1", fault, 2) for fault in FAULTS),
    ("0", "killed", 1),
]
"""Rank, fault and number, see failing_rank.py."""


OF_EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 32 --disable-bias-linear
    --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2""".split()


def undisturbed(folder: Path, *model: str, rollback_bytes: int | None = None) -> tuple[Path, dict]:
    """A run of five iterations: its folder and metrics."""
    workload = describe(folder / "w.json", [*model_options(OPTIONS), *model])
    on_drive(workload, 3, folder / "s.json", 3, every=1000, rollback_bytes=rollback_bytes)
    done = failing_run(folder, "0", "none", 0, *model, "--train-iters", "5")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module", params=[0, None], ids=["during the backward", "at its end"])
def whole(request, megatron_tree, tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("whole"), rollback_bytes=request.param)


@pytest.fixture(scope="module")
def whole_with_experts(megatron_tree, tmp_path_factory):
    """Each rank has experts of its own."""
    return undisturbed(tmp_path_factory.mktemp("experts"), *OF_EXPERTS)


@pytest.mark.parametrize("rank, fault, number", ENDS)
def test_the_last_checkpoint_goes_on_as_the_run_would_have(whole, tmp_path, rank, fault, number):
    check_resumed(whole, tmp_path, rank, fault, number)


@pytest.mark.parametrize("rank, fault, number", [("1", "killed", 1), ("0", "saving", 3), ("1", "saving", 2)])
def test_a_run_with_experts_that_is_killed_goes_on(whole_with_experts, tmp_path, rank, fault, number):
    check_resumed(whole_with_experts, tmp_path, rank, fault, number, *OF_EXPERTS)


def check_resumed(whole: tuple[Path, dict], tmp_path: Path, rank: str, fault: str, number: int, *model: str) -> None:
    """A run whose ``rank`` fails ends, leaves nothing on the drive, and goes on from its last checkpoint."""
    (tmp_path / "s.json").symlink_to(whole[0] / "s.json")
    saved = tmp_path / "saved"
    save = [*model, "--train-iters", "5", "--save", str(saved), "--save-interval", "1"]
    failed = failing_run(tmp_path, rank, fault, number, *save)
    assert failed.returncode != 0 and not (tmp_path / "metrics.json").exists()
    assert "Traceback" not in failed.stderr, failed.stderr
    assert os.listdir(tmp_path / "drive") == []
    begun = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert 1 <= begun <= 3
    resumed = failing_run(tmp_path, rank, "none", 0, *save, "--load", str(saved))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert json.dumps(metrics["loss"]) == json.dumps(whole[1]["loss"][begun:])
    assert metrics["parameter_sha256"] == whole[1]["parameter_sha256"]
    assert sorted(path.name for path in saved.iterdir() if path.suffix) == ["latest_checkpointed_iteration.txt"]
