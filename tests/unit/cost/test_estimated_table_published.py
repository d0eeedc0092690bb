"""Iteration times from a data sheet alone, against published ones: within a quarter, with no fitted constant.

The published rates of ZeRO-3 (published_zero3_floor.json) are not among them: nobody published compute by itself, and
that program of 2021 gathered at a tenth of what the network carries, which no data sheet tells.
"""

import json

import pytest
from places import DATA_DIR

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.combine_tables import combine
from megatron_ext.cost.cost_table import Compute, CostTable, check
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Workload

A100 = hardware_sheet.load("a100-rdma")
WITHIN = 0.25

# Layers, hidden size, heads, micro-batch size: Qi et al. 2023 (arXiv 2401.10241), table 3. Sequences of 1024.
PIPELINES = {
    "1.5B": (22, 2304, 24, 6),
    "6.2B": (30, 4096, 32, 3),
    "14.6B": (46, 5120, 40, 1),
    "28.3B": (62, 6144, 48, 1),
}


def rows(name: str) -> list[dict]:
    return json.loads((DATA_DIR / f"published_{name}.json").read_text())["rows"]


def gpt(layers: int, hidden: int, heads: int, positions: int) -> GptShape:
    return GptShape(layers, hidden, 4 * hidden, heads, heads, 51200, hidden // heads, positions=positions, tied=False)


def pipeline(row: dict, vp: int) -> tuple[Workload, MicroBatch]:
    """As they train: one layer less on the first stage and on the last, which have the embedding and the output."""
    layers, hidden, heads, micro_batch_size = PIPELINES[row["model"]]
    parallel = Parallel.of(
        pp=row["pipeline_parallel_size"],
        vp=vp,
        dp=1,
        microbatches=row["num_microbatches"],
        gpus_per_node=8,
        order="interleaved" if vp > 1 else "1f1b",
    )
    stages = parallel.pp * vp
    counts = [(layers + 2) // stages] * stages
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    batch = MicroBatch(1024, micro_batch_size, score_heads=heads)  # attention was not fused
    return gpt_workload(gpt(layers, hidden, heads, 1024), parallel, batch, layers_of_stages=counts), batch


@pytest.mark.parametrize("order", ["1f1b", "interleaved"])
@pytest.mark.parametrize("row", rows("bubble_rates"), ids=lambda r: f"{r['model']}-{r['num_microbatches']}")
def test_pipelines(row, order):
    work, batch = pipeline(row, row["virtual_stages"] if order == "interleaved" else 1)
    samples = row["num_microbatches"] * batch.micro_batch_size
    published_us = samples / work.parallel.pp / row[f"measured_samples_per_gpu_s_{order}"] * 1e6
    estimated = estimate(A100, work, batch)
    assert evaluate(work, estimated, bound_us=0.0).iteration_time_us == pytest.approx(published_us, rel=WITHIN)
    # The measured compute in its place comes closer than that.
    vp = work.parallel.vp
    backward_ms = row["backward_input_ms"] + row["backward_weight_ms"]
    measured = CostTable(
        schema_version=2,
        kind="cost_table",
        compute=tuple(
            Compute(
                pp_rank=chunk.pp_rank,
                model_chunk_id=chunk.model_chunk_id,
                forward_us=1e3 * row["forward_ms"] / vp,
                backward_us=1e3 * backward_ms / vp,
            )
            for chunk in work.chunks
        ),
    )
    both = combine({"measured": check(measured), "estimated": estimated})
    assert evaluate(work, both, bound_us=0.0).iteration_time_us == pytest.approx(published_us, rel=0.16)
