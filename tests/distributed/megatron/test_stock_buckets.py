"""The buckets that predictions of stock Megatron rest on are those that Megatron makes, and gathers in that order."""

import json
import sys

import pytest
from cases import MODELS
from places import HELPERS
from test_gpt_shapes import by_arithmetic
from training import run_warm
from variations import some

from megatron_ext.workload import bucket_rules

ELEMENTS = 9_000
"""Of a bucket: two or three to a layer."""


@pytest.mark.parametrize("name", some(("tied-recompute", "fp32"), 1))
def test_buckets_of_the_first_stage(megatron_tree, monkeypatch, name):
    monkeypatch.setattr(bucket_rules, "LEAST_BUCKET", ELEMENTS)
    monkeypatch.setattr(bucket_rules, "BUCKET_OF_A_RANK", ELEMENTS)
    (chunk,) = by_arithmetic([*MODELS[name], "--data-parallel-size", "1"]).chunks
    program = [sys.executable, str(HELPERS / "bucket_names.py"), str(ELEMENTS), *MODELS[name]]
    answer = run_warm([*program, "--data-parallel-size", "1"])
    assert answer.returncode == 0, answer.stderr
    theirs = json.loads(answer.stdout.splitlines()[-1])
    ours = [sorted(p.name for p in part) for part in bucket_rules.stock_buckets(chunk, 1)]
    assert ours == theirs["buckets"][::-1] and len(ours) > 4
    check_gathers(len(ours), theirs["synchronous"], theirs["overlapped"])


def check_gathers(number: int, synchronous: list, overlapped: list) -> None:
    """Megatron's buckets count from the last layers on. Without --overlap-param-gather all are gathered at once, in
    this order. With it the first that computes is gathered when it does, each other when the one before is used."""
    assert synchronous == [["gather", bucket] for bucket in range(number)]
    in_use = [["gather", bucket] for bucket in reversed(range(number))]
    assert [event for event in overlapped if event[0] == "gather"] == in_use
    for bucket in reversed(range(number)):
        before = min(bucket + 1, number - 1)
        uses = [place for place, event in enumerate(overlapped) if event[0] == "module" and before in event[1]]
        between = overlapped[uses[0] : overlapped.index(["gather", bucket])]
        assert [kind for kind, _ in between] == ["module", "gather"][: len(between)] and between, (bucket, between)
