"""Gathers in two legs bring what one all-gather brings."""

import sys
from pathlib import Path

from training import run


def test_two_legs_bring_the_same_bytes():
    program = Path(__file__).with_name("hierarchical_rank.py")
    result = run([sys.executable, "-m", "megatron_ext.runtime.launch", "--nproc-per-node", "4", str(program)])
    assert result.returncode == 0, result.stderr
