"""Gathers in two legs, and of shards in pieces, bring what one all-gather brings."""

import sys

from places import HELPERS
from training import run


def test_two_legs_and_pieces_bring_the_same_bytes():
    program = HELPERS / "hierarchical_rank.py"
    result = run(
        [sys.executable, "-m", "megatron_ext.launch.launcher", "--fork", "--nproc-per-node", "4", str(program)]
    )
    assert result.returncode == 0, result.stderr
