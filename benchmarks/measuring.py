"""The commands that describe, measure and train a run of the example on this machine's processors."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.measured_sizes import largest_group_bytes, largest_rank_bytes, likely_group_bytes

ROOT = Path(__file__).resolve().parents[1]
LAYERS = str(ROOT / "examples" / "example_layers.py") + ":layer_runners"
"""Who makes the layers whose compute is measured."""
CORPUS = "runs/corpus/stdlib"
"""The example's data set, which scripts/pretrain_gpt_hybrid.sh builds."""


def measure_command(
    out: Path, work, model: list[str], *, hidden: int, seq: int, micro_batch_size: int, seconds: float
) -> list[str]:
    """What follows ``python -m``: sizes up to the run's largest group, and those of likely groups.

    Args:
        work: the run's workload, without limits.
        model: the example's options.
    """
    options = {
        "--out": out,
        "--device": "cpu",
        "--dp": work.parallel.dp,
        "--pp": work.parallel.pp,
        "--hidden-size": hidden,
        "--seq-length": seq,
        "--micro-batch-size": micro_batch_size,
        "--min-bytes": 512,
        "--max-bytes": largest_group_bytes(work),
        "--max-rank-bytes": largest_rank_bytes(work),
        "--also-sizes": ",".join(map(str, likely_group_bytes(work))),
        "--seconds": seconds,
        "--threads": 1,
        "--modules": LAYERS,
    }
    words = [str(word) for name, value in options.items() if value != "" for word in (name, value)]
    return ["megatron_ext", "measure", *words, "--", *model, "--data-path", CORPUS, "--num-workers", "0"]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of a benchmark's model."""
    for name, size in (("--layers", 8), ("--hidden", 256), ("--seq", 128), ("--micro-batch-size", 2)):
        parser.add_argument(name, type=int, default=size)


def training_command(model: list[str], iterations: int, metrics: Path, *more: str) -> list[str]:
    """What follows ``python`` in a training run of the example."""
    options = [*model, "--data-path", CORPUS, "--train-iters", str(iterations), "--metrics-path", str(metrics)]
    return ["examples/pretrain_gpt_hybrid.py", *options, *more]


def describe(
    path: Path, model: list[str], zero_stage: int, whole_parameter_bytes: int | None
) -> workload_file.Workload:
    """The workload of the example with the options ``model``; None does not limit whole parameters on a device.

    Raises:
        InputError: what ``describe`` said.
    """
    limit = ["--limit-whole-parameter-bytes", str(whole_parameter_bytes)] if whole_parameter_bytes else []
    options = ["--out", str(path), "--zero-stage", str(zero_stage), *limit]
    options += [*"--hidden-dropout 0 --attention-dropout 0 --transformer-impl local".split(), *model]  # the example's
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".megatron"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "megatron_ext", "describe", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise InputError(done.stderr.strip().splitlines()[-1], field="describe", value=done.returncode)
    return workload_file.load(path)
