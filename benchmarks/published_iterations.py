"""What data sheets predict, next to iteration times that others have published.

    .venv/bin/python benchmarks/published_iterations.py [--only TEXT]

``data/published_iterations.json`` holds the rows: models of 125M to 1T parameters on 1 to 16,384 GPUs. Each is stock
training as its publication describes it, simulated with the costs of a sheet of the package. Micro-batches beyond those
that are simulated are added on a straight line. Writes results/published_iterations.json.
"""

import argparse
import os
import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import machine
from msgspec.structs import replace

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.cost.hardware_sheet import HardwareSheet
from megatron_ext.formats import json_files
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.workload import workload as workloads
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.parallel import Parallel, megatron_order
from megatron_ext.workload.workload import Experts, Workload

HERE = Path(__file__).parent
DATA: dict[str, Any] = json_files.load(HERE / "data" / "published_iterations.json", dict)
LONG = "FSDP, attention not by FlashAttention-2"
FIRST = "these, with the rate of the first FlashAttention"
MOST_STEPS = 8192
"""Forward and backward steps of all pipeline ranks that are simulated."""


@cache
def sheet_of(name: str) -> HardwareSheet:
    """A sheet of the package, or one of the rows' own, which extends such a one."""
    if name not in DATA["sheets"]:
        return hardware_sheet.load(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        json_files.save(path, {"schema_version": 2, "kind": "hardware_sheet", **DATA["sheets"][name]})
        return hardware_sheet.load(path)


def by_first_flash_attention(sheet: HardwareSheet, name: str) -> HardwareSheet:
    value = DATA["first_flash_attention"][name[:4]]
    attention = replace(sheet.device.attention_efficiency, value=value, low=value, high=value)
    return replace(sheet, device=replace(sheet.device, attention_efficiency=attention))


def with_experts(workload: Workload, row: dict) -> Workload:
    """Every layer's feed-forward network is one of the experts that a rank holds."""
    local = row["num_experts"] // row["ep"]

    def of_rank(parameter):
        if ".mlp." not in parameter.name or len(parameter.shape) < 2:
            return [parameter]
        names = [parameter.name.replace(".mlp.", f".mlp.experts.local_experts.{number}.") for number in range(local)]
        return [replace(parameter, name=name, expert=True) for name in names]

    chunks = tuple(
        replace(
            chunk,
            parameters=tuple(made for parameter in chunk.parameters for made in of_rank(parameter)),
            layer_kinds=tuple("moe" if kind == "transformer" else kind for kind in chunk.layer_kinds),
        )
        for chunk in workload.chunks
    )
    experts = Experts(num_experts=row["num_experts"], router_topk=row["router_topk"])
    return workloads.check(replace(workload, chunks=chunks, experts=experts))


def simulated_s(row: dict, sheet: HardwareSheet, microbatches: int, recompute: str | None) -> float:
    """One iteration of ``microbatches``, in seconds."""
    shape, (pp, vp, tp) = GptShape(**DATA["shapes"][row["shape"]]), (row.get(n) or 1 for n in ("pp", "vp", "tp"))
    parallel = Parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        data_parallel_size=row.get("dp", 1),
        tensor_model_parallel_size=tp,
        num_microbatches=microbatches,
        gpus_per_node=row.get("gpus_per_node", 8),
        order=megatron_order(pp, vp),
        expert_model_parallel_size=row.get("ep", 1),
        expert_tensor_parallel_size=row.get("etp"),
    )
    batch = MicroBatch(
        row["seq_length"],
        row.get("micro_batch_size", 1),
        context_parallel=row.get("cp", 1),
        sequence_parallel=row.get("sequence_parallel", False) and tp > 1,
        recompute=recompute,
        score_heads=shape.heads // tp if row.get("attention_not_fused") else 0,
        hidden_dropout=row.get("dropout", False),
        loss_fusion=row.get("loss_fusion"),
    )
    workload = gpt_workload(
        shape._replace(stage_layers=tuple(row.get("layers_of_stages", ()))),
        parallel,
        batch,
        zero_stage=row.get("zero_stage", 1),
        optimizer=OptimizerSettings(on_host=row.get("optimizer_on_host", False)),
    )
    workload = with_experts(workload, row) if "num_experts" in row else workload
    return evaluate(workload, estimate(sheet, workload, batch)).iteration_time_us / 1e6


def predicted_s(row: dict, sheet: HardwareSheet | None = None) -> float:
    """One iteration as published, in seconds. ``recompute`` half: between none and full."""
    sheet, pp, given = sheet or sheet_of(row["sheet"]), row.get("pp", 1), row.get("recompute")
    wanted, times = row.get("microbatches", 1), []
    most = max(2 * pp, MOST_STEPS // (pp * (row.get("vp") or 1)) // pp * pp) if pp > 1 else 16
    few = max(most // 2 // pp * pp, pp)
    for recompute in (None, "full") if given == "half" else (given,):
        time = simulated_s(row, sheet, min(wanted, most), recompute)
        if wanted > most:
            time += (time - simulated_s(row, sheet, few, recompute)) / (most - few) * (wanted - most)
        times.append(time)
    return statistics.fmean(times)


def summary_of(ratios: list[float]) -> dict:
    """Number, median, and 10th and 90th percentile of predicted over published."""
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return {"rows": len(ratios), "median": statistics.median(ratios), "p10": tenths[0], "p90": tenths[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="Rows whose name holds this; nothing is written.")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "published_iterations.json")
    args = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    for row in DATA["rows"]:
        if args.only not in row["name"]:
            continue
        made = {"name": row["name"], "group": row["group"], "published_s": row["seconds"]}
        made["predicted_s"] = round(predicted_s(row), 5)
        if row["group"] == LONG:
            sheet = by_first_flash_attention(sheet_of(row["sheet"]), row["sheet"])
            made["predicted_s_by_first_flash_attention"] = round(predicted_s(row, sheet), 5)
        rows.append(made)
        print(
            f"{made['name']}: {made['published_s']:.3f} s, {made['predicted_s'] / made['published_s']:.2f}", flush=True
        )
    groups: dict[str, list[float]] = {}
    for made in rows:
        names = {"predicted_s": made["group"], "predicted_s_by_first_flash_attention": FIRST}
        for key, name in names.items():
            if key in made:
                groups.setdefault(name, []).append(made[key] / made["published_s"])
    groups = {name: ratios for name, ratios in groups.items() if len(ratios) > 1}
    summary = {name: summary_of(ratios) for name, ratios in groups.items()}
    for name, found in summary.items():
        print("{rows:4d} rows, median {median:.2f} ({p10:.2f} to {p90:.2f})  ".format(**found) + name)
    if not args.only:
        machine.write(args.out, {"summary": summary, "rows": rows}, load_before=load)


if __name__ == "__main__":
    main()
