"""The example trains the same model whatever the parallel sizes, and on one rank in a fifth of its memory."""

import json

import pytest
from msgspec.structs import replace
from plans import describe, made_up_table
from training import PP2_VP2_DP2, SMALL, launch_training

from megatron_ext.planner import plan
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.workload.workload import Limits

COMMON = [*SMALL, "--init-by-name", "--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "10"]


@pytest.mark.nightly
def test_loss_equals_that_of_one_process_within_rounding(corpus_prefix, tmp_path):
    one, four = tmp_path / "one.json", tmp_path / "four.json"
    data = ["--data-path", corpus_prefix]
    alone = launch_training([*COMMON, *data, "--metrics-path", one], nproc=1)
    assert alone.returncode == 0, alone.stderr
    together = launch_training([*COMMON, *data, *PP2_VP2_DP2, "--metrics-path", four])
    assert together.returncode == 0, together.stderr
    expected, got = json.loads(one.read_text())["loss"], json.loads(four.read_text())["loss"]
    assert len(expected) == len(got) == 10
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, got))
    assert worst <= 5e-6, (worst, expected, got)
    assert expected[-1] < expected[0] - 0.5, "the model learns, so equal losses mean something"


@pytest.mark.nightly
def test_one_rank_trains_five_times_what_its_device_holds(corpus_prefix, tmp_path):
    """Parameters and gradients are five times ``limits.device_bytes``; losses are those of stock Megatron."""
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    model = [*SMALL, "--num-layers", "16", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "2"]
    model += ["--bf16", "--optimizer-cpu-offload", *recompute]
    work = describe(tmp_path / "w.json", ["--zero-stage", "3", *model])
    parameters = [p for chunk in work.chunks for p in chunk.parameters]
    limit = sum(p.bytes + 4 * p.numel for p in parameters) // 5
    schedule = plan(replace(work, limits=Limits(device_bytes=limit)), made_up_table())
    schedule_file.save(tmp_path / "s.json", schedule)
    options = [*model, "--data-path", corpus_prefix, "--train-iters", "3", "--metrics-path"]
    stock, ours = tmp_path / "stock.json", tmp_path / "ours.json"
    for path, more in ((stock, []), (ours, ["--user-defined-schedule", tmp_path / "s.json"])):
        result = launch_training([*options, path, *more], nproc=1)
        assert result.returncode == 0, result.stderr
    expected, got = (json.loads(path.read_text()) for path in (stock, ours))
    assert got["loss"] == expected["loss"]  # two visits: a sum of two has one order
    (held,) = got["census"]
    total = sum(held["device_bytes"].values())
    assert total <= limit
    assert abs(schedule.predicted.memory[0].device_total_bytes / total - 1) <= 0.02
