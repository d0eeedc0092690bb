"""Runs of failing_rank.py: two ranks whose optimizer states rest on the drive, one of which fails."""

import subprocess
from pathlib import Path

from cases import ALL_LAYOUTS, MODELS
from places import HELPERS
from training import ranks_command, run_warm

MODEL = "bf16-offload"
OPTIONS = [*ALL_LAYOUTS["two_replicas"], *MODELS[MODEL]]


def failing_run(folder: Path, rank: str, fault: str, number: int, *more: str) -> subprocess.CompletedProcess:
    """Train by ``folder/s.json``; what stays on the drive is in ``folder/drive``. See failing_rank.py for the rest."""
    (folder / "drive").mkdir(exist_ok=True)
    options = [*OPTIONS, "--user-defined-schedule", folder / "s.json", "--metrics-path", folder / "metrics.json"]
    options += ["--user-defined-schedule-nvme-path", folder / "drive", *more]
    return run_warm(ranks_command(str(HELPERS / "failing_rank.py"), [rank, fault, number, *options], nproc=2))
