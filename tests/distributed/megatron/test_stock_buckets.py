"""The buckets that predictions of stock Megatron rest on are those that Megatron makes."""

import json
import subprocess
import sys

import pytest
from cases import MODELS
from places import HELPERS
from test_gpt_shapes import by_arithmetic
from training import environment

from megatron_ext.workload.bucket_rules import stock_buckets

ELEMENTS = 9_000
"""Of a bucket: two or three to a layer."""


@pytest.mark.parametrize("name", ("fp32", "tied-recompute"))
def test_buckets_of_the_first_stage(megatron_tree, name):
    (chunk,) = by_arithmetic([*MODELS[name], "--data-parallel-size", "1"]).chunks
    program = [sys.executable, str(HELPERS / "bucket_names.py"), str(ELEMENTS), *MODELS[name]]
    answer = subprocess.run(
        [*program, "--data-parallel-size", "1"], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert answer.returncode == 0, answer.stderr
    theirs = json.loads(answer.stdout.splitlines()[-1])
    ours = [sorted(p.name for p in part) for part in stock_buckets(chunk, 1, ELEMENTS)]
    assert ours == theirs[::-1] and len(ours) > 4
