"""The real model's layers as ``measure --modules`` takes them, and when reading samples is part of a step."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from places import ROOT
from variations import ALL
from warm_python import warm_children

from megatron_ext.formats.errors import InputError
from megatron_ext.launch import launcher
from megatron_ext.measure import Options, measure

MODEL = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16")


@pytest.fixture(autouse=True)
def warm_ranks():
    with warm_children(launcher):
        yield


def options(*more: str) -> Options:
    return Options(
        data_parallel_size=2,
        max_bytes=8192,
        seconds=2,
        links=("compute",),
        hidden_size=32,
        seq_length=16,
        threads=1,
        modules=f"{ROOT}/examples/example_layers.py:layer_runners",
        module_args=(*MODEL, *more),
    )


def test_every_kind_of_layer_and_a_step_that_reads_the_runs_samples(corpus_prefix, tmp_path):
    prefix = tmp_path / "stdlib"  # beside it is the data set's index
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).symlink_to(corpus_prefix.with_suffix(suffix))
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    wanted = options("--data-path", str(prefix), "--num-workers", "0", *recompute)
    rows = {row.layer_kind: row for row in measure(wanted).compute}
    assert set(rows) == {"embedding", "transformer", "output", "step"}
    assert all(row.forward_us > 0 and row.backward_us > 0 for row in rows.values())
    assert (tmp_path / "cache").is_dir()  # the data set's index: its samples were read
    # Recomputed as set: a layer keeps its input in float32 alone, and its backward makes the rest anew.
    layer = rows["transformer"]
    assert layer.activation_bytes == 16 * 32 * 4 < layer.recompute_bytes
    assert rows["output"].recompute_bytes == 0 < rows["output"].activation_bytes


def test_samples_that_cannot_be_read_are_refused_only_where_they_would_be(tmp_path, monkeypatch):
    missing = ("--data-path", str(tmp_path / "missing"))
    with pytest.raises(InputError, match="no such file"):
        measure(replace(options(*missing, "--num-workers", "0"), data_parallel_size=1))
    if ALL:
        assert "step" in compute_as_on_cuda(monkeypatch, *missing)  # somebody else reads them


def compute_as_on_cuda(monkeypatch, *more: str) -> dict:
    """Where the pipeline frees what it has sent, Megatron's backward step asserts that outputs were freed, which nobody
    does in a measurement."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "helpers"), prepend=os.pathsep)
    wanted = replace(options(*more), modules="layers:freeing_outputs")
    rows = {row.layer_kind: row for row in measure(wanted).compute}
    assert rows["step"].backward_us > 0
    return rows
