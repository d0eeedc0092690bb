"""The strict stand-in reports both faults that a first GPU showed on the code of that day, and none today."""

import subprocess
import sys

import pytest
from places import HELPERS, MEGATRON, ROOT

THEN = "97c82f4"
"""The commit that ran on the GPU."""


def judge(checkout, expect: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(HELPERS / "old_code.py"), str(checkout), "--expect", expect]
    return subprocess.run(command, capture_output=True, text=True, timeout=560)


def test_the_code_that_ran_on_a_gpu_has_both_faults(megatron_tree, tmp_path):
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", THEN], capture_output=True)
    if archive.returncode != 0:
        pytest.skip(f"this checkout's history does not reach back to {THEN}")
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive.stdout, check=True)
    (tmp_path / ".megatron").symlink_to(MEGATRON)
    result = judge(tmp_path, "faults")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_code_of_today_has_neither(megatron_tree):
    result = judge(ROOT, "none")
    assert result.returncode == 0, result.stdout + result.stderr
