"""Runs of a GPT of 8 layers of 4096 on one H200: measured, and predicted from the data sheet alone."""

import json

from parallel_sizes import sized
from places import DATA_DIR

from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

BATCH = MicroBatch(2048, 4)
SHAPE = GptShape(8, 4096, 16384, 32, 32, 384, 128, positions=2048, tied=False)


TINY = GptShape(8, 256, 1024, 4, 4, 384, 64, positions=128, tied=False)
"""Of 6.5 million parameters: 59 ms per iteration."""


def tiny_run():
    """Workload and cost table of :data:`TINY`, from the data sheet alone."""
    parallel = sized(pp=1, vp=1, dp=1, microbatches=2, order="no_pipeline")
    work = gpt_workload(TINY, parallel, MicroBatch(128, 2), zero_stage=3)
    return work, estimate(sheets.load("h200-one-gpu"), work, MicroBatch(128, 2))


def measured_ms(name: str) -> float:
    """An iteration of the run of that name."""
    (found,) = (run for run in json.loads((DATA_DIR / "h200_runs.json").read_text())["runs"] if run["name"] == name)
    return found["iteration_ms"]


def predicted_ms(*, on_host: bool, device_bytes: int | None = None) -> float:
    """The same by stock Megatron's rule; with ``device_bytes`` by a plan at zero stage 3."""
    work = gpt_workload(
        SHAPE,
        sized(pp=1, vp=1, dp=1, microbatches=4, order="no_pipeline"),
        BATCH,
        zero_stage=1 if device_bytes is None else 3,
        limits=Limits(device_bytes=device_bytes),
        optimizer=OptimizerSettings(on_host=on_host),
    )
    table = estimate(sheets.load("h200-one-gpu"), work, BATCH)
    schedule = None if device_bytes is None else plan(work, table)
    return evaluate(work, table, schedule).iteration_time_us / 1e3
