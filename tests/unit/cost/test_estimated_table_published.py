"""Iteration times from a data sheet alone, against published ones: within a quarter, with no fitted constant.

The published rates of ZeRO-3 (published_zero3_floor.json) are not among them: nobody published compute by itself, and
that program of 2021 gathered at a tenth of what the network carries, which no data sheet tells.
"""

import json

import published_iterations
import pytest
from msgspec.structs import replace
from parallel_sizes import sized
from places import DATA_DIR

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.combine_tables import combine
from megatron_ext.cost.cost_table import Compute, CostTable, check
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
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


LLAMA = {
    # Layers, hidden and feed-forward size, heads. The Llama 3 Herd of Models (arXiv 2407.21783), table 3.
    "8B": (32, 4096, 14336, 32),
    "70B": (80, 8192, 28672, 64),
    "405B": (126, 16384, 53248, 128),
}
# FSDP and TP ranks, samples of 8192 tokens a rank, recompute, tokens a second and GPU, predicted over published.
# torchtitan, docs/performance.md and benchmarks/llama3_h100_202412_torchtitan.md (H100 at 500 W, torch.compile),
# benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (bfloat16 without asynchronous TP).
FSDP = {
    "8B, 8 H100": ("8B", 8, 1, 2, "half", 6667, 1.00),
    "8B, 128 H100": ("8B", 128, 1, 2, "half", 6514, 0.96),
    "70B, 256 H100": ("70B", 32, 8, 16, "full", 597.3, 0.97),
    "405B, 128 H100": ("405B", 16, 8, 2, "full", 109, 0.90),
    "8B, 64 A100": ("8B", 64, 1, 1, "half", 2973, 0.93),
    "70B, 64 A100": ("70B", 64, 1, 1, "full", 331, 0.97),
}

# Predicted over published, of eight of the rows of benchmarks/published_iterations.py, which has their settings.
ROWS = {
    "mpt-7b a100_80gb 8g seq2048 mbs6x2": 0.97,
    "mpt-70b h100_80gb 512g seq2048 mbs8x1 AC": 0.93,
    "korthikanti 175B selective": 0.98,
    "korthikanti 530B full": 1.07,
    "GPT3 175B 2048 H100": 0.95,
    "Nemotron4 340B 2048 H100": 1.04,
    "Llama3.1 8B 128 H100 CP2": 0.98,
    "Llama 3 405B 16384 H100 CP16 seq131072": 1.01,
}


def rows(name: str) -> list[dict]:
    return json.loads((DATA_DIR / f"published_{name}.json").read_text())["rows"]


def gpt(layers: int, hidden: int, heads: int, positions: int) -> GptShape:
    return GptShape(layers, hidden, 4 * hidden, heads, heads, 51200, hidden // heads, positions=positions, tied=False)


def pipeline(row: dict, vp: int) -> tuple[Workload, MicroBatch]:
    """As they train: one layer less on the first stage and on the last, which have the embedding and the output."""
    layers, hidden, heads, micro_batch_size = PIPELINES[row["model"]]
    parallel = sized(
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
    shape = gpt(layers, hidden, heads, 1024)._replace(stage_layers=tuple(counts))
    return gpt_workload(shape, parallel, batch), batch


@pytest.mark.parametrize("order", ["1f1b", "interleaved"])
@pytest.mark.parametrize("row", rows("bubble_rates"), ids=lambda r: f"{r['model']}-{r['num_microbatches']}")
def test_pipelines(row, order):
    work, batch = pipeline(row, row["virtual_stages"] if order == "interleaved" else 1)
    samples = row["num_microbatches"] * batch.micro_batch_size
    published_us = samples / work.parallel.pp / row[f"measured_samples_per_gpu_s_{order}"] * 1e6
    estimated = estimate(A100, work, batch)
    assert evaluate(work, estimated).iteration_time_us == pytest.approx(published_us, rel=WITHIN)
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
    assert evaluate(work, both).iteration_time_us == pytest.approx(published_us, rel=0.16)


@pytest.mark.parametrize("name", FSDP)
def test_fsdp_of_llama_3(name):
    """Every layer gathered anew, attention by FlashAttention-2, PyTorch's own then. `half`: every second matrix product
    is computed again, half of what recomputing all takes."""
    model, dp, tp, samples, recompute, tokens_per_s, ratio = FSDP[name]
    sheet = A100
    if "H100" in name:
        sheet = hardware_sheet.load("h100-500w-rdma")
        attention = replace(sheet.device.attention_efficiency, value=0.33)
        sheet = replace(sheet, device=replace(sheet.device, attention_efficiency=attention))
    layers, hidden, ffn, heads = LLAMA[model]
    how = {"gated": True, "rms_norm": True, "linear_bias": False, "qkv_bias": False, "tied": False}
    shape = GptShape(layers, hidden, ffn, heads, 8, 128256, 128, **how)
    parallel = sized(pp=1, vp=1, dp=dp, tp=tp, microbatches=1, gpus_per_node=8, order="no_pipeline")
    times = []
    for each in ("full", *((None,) if recompute == "half" else ())):
        batch = MicroBatch(8192, samples, sequence_parallel=tp > 1, recompute=each)
        work = gpt_workload(shape, parallel, batch, zero_stage=3)
        times.append(evaluate(work, estimate(sheet, work, batch)).iteration_time_us / 1e6)
    published_s = 8192 * samples / tp / tokens_per_s
    assert sum(times) / len(times) / published_s == pytest.approx(ratio, abs=0.015)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_other_publications(name):
    row = next(row for row in published_iterations.DATA["rows"] if row["name"] == name)
    assert published_iterations.predicted_s(row) / row["seconds"] == pytest.approx(ROWS[name], abs=0.015)
