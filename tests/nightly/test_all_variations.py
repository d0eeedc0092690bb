"""Tests of the other tiers that run some of their variations there, or leave a test to this one: here all of them."""

import os
import subprocess
import sys

import pytest
from places import ROOT
from variations import VARIABLE

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for tier in ("unit", "distributed", "end_to_end")
    for path in (ROOT / "tests" / tier).rglob("test_*.py")
    if any(text in path.read_text() for text in ("\nfrom variations import", "\n@pytest.mark.nightly"))
)


@pytest.mark.parametrize("file", FILES)
def test_every_variation(file):
    command = [sys.executable, "-m", "pytest", file]
    assert subprocess.run(command, cwd=ROOT, env=os.environ | {VARIABLE: "1"}, timeout=290).returncode == 0
