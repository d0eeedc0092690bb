"""States on the drive, whatever ends a rank: every rank ends, nothing stays, and the last checkpoint goes on."""

import json
import os

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


@pytest.fixture(scope="module", params=[0, None], ids=["beside the backward", "at its end"])
def whole(request, megatron_tree, tmp_path_factory):
    """A run of five iterations that nothing disturbs: its folder and metrics."""
    folder = tmp_path_factory.mktemp("whole")
    workload = describe(folder / "w.json", model_options(OPTIONS))
    on_drive(workload, 3, folder / "s.json", 3, every=1000, rollback_bytes=request.param)
    done = failing_run(folder, "0", "none", 0, "--train-iters", "5")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize("rank, fault, number", ENDS)
def test_the_last_checkpoint_goes_on_as_the_run_would_have(whole, tmp_path, rank, fault, number):
    (tmp_path / "s.json").symlink_to(whole[0] / "s.json")
    saved = tmp_path / "saved"
    save = ["--train-iters", "5", "--save", str(saved), "--save-interval", "1"]
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
