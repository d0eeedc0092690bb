"""Predicted beside measured: gather time per group and iteration time, over models and layouts.

    python benchmarks/cost_prediction.py [--models small medium large long] [--layouts pp2 dp4] [--iters 12]

For every model and layout: the main job (scripts/pretrain_gpt_hybrid.sh: measure, plan, train
stock and by the schedule, report), then every group of the schedule gathered by both routes
again, at its own size, on all ranks at once. Prints a table and writes
benchmarks/results/cost_prediction.json with date, machine and errors. Ends 0 if for three models at
least all gathers are within 15 % and all iterations within 10 %, 1 otherwise.

Another program on the machine shifts every measured time. How many processors others used is
printed, and beside the prediction (for an idle machine) one for the processors they left.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import msgspec
import pictures

from megatron_ext import files, simulator
from megatron_ext.cost import model as cost
from megatron_ext.cost.predict import Costs
from megatron_ext.measure import Options, measure
from megatron_ext.measure.others import OtherPrograms
from megatron_ext.measure.progress import bar
from megatron_ext.schedule import model as schedule
from megatron_ext.schedule import validate
from megatron_ext.workload import model as workload

REPOSITORY = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "cost_prediction.json"
GATHER_WITHIN, ITERATION_WITHIN = 0.15, 0.10

MODELS = {
    "small": {"LAYERS": 8, "HIDDEN": 128, "SEQ": 64, "MICRO_BATCH_SIZE": 2},
    "medium": {"LAYERS": 8, "HIDDEN": 256, "SEQ": 128, "MICRO_BATCH_SIZE": 2},
    "large": {"LAYERS": 8, "HIDDEN": 512, "SEQ": 64, "MICRO_BATCH_SIZE": 2},
    "long": {"LAYERS": 8, "HIDDEN": 384, "SEQ": 256, "MICRO_BATCH_SIZE": 2},
}
"""``small``: its steps take 5 ms, of which a tenth is in no row of the table: reading samples, the code
around messages, stock Megatron's pre-hooks."""
LAYOUTS = {"pp2": {"PP": 2, "VP": 2, "DP": 2}, "dp4": {"PP": 1, "VP": 1, "DP": 4}}


def main_job(name: str, settings: dict) -> Path:
    """Run the main job; its directory."""
    environment = os.environ | {key: str(value) for key, value in settings.items()} | {"NAME": name}
    done = subprocess.run([REPOSITORY / "scripts" / "pretrain_gpt_hybrid.sh"], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the main job {name} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return REPOSITORY / "runs" / name


def report(run: Path) -> dict:
    done = subprocess.run([sys.executable, "-m", "megatron_ext", "report", str(run), "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def gathers(run: Path, layout: dict, seconds: float) -> list[dict]:
    """Every distinct group size of the schedule, predicted by the run's table and measured again."""
    costs = Costs(cost.load(run / "cost_table.json"))
    sizes = sorted({group.bytes for group in schedule.decode(run / "schedule.json").groups})
    options = Options(
        data_parallel_size=layout["DP"], pipeline_model_parallel_size=layout["PP"], sizes=tuple(sizes),
        seconds=seconds, links=("gpu", "cpu"),
    )  # fmt: skip
    with bar() as progress:
        again = measure(options, progress)
    rows = []
    for route in ("gpu", "cpu"):
        for point in getattr(again.routes, route).points:
            predicted = costs.gather(route, point.size_bytes)
            rows.append({
                "route": route, "size_bytes": point.size_bytes, "predicted_us": predicted.us, "measured_us": point.p50_us,
                "error": predicted.us / point.p50_us - 1, "in_interval": predicted.low_us <= point.p50_us <= predicted.high_us,
            })  # fmt: skip
    return rows


def on_what_was_left(run: Path, kind: str, others: float) -> float:
    """Microseconds of an iteration where others keep ``others`` processors busy."""
    table, work = cost.load(run / "cost_table.json"), workload.load(run / "workload.json")
    left = max(1 - others / table.metadata.hardware["processors"], 0.05)
    topology = msgspec.structs.replace(table.topology, processors_per_node=table.topology.processors_per_node * left)
    given = validate.load(run / "schedule.json") if kind == "scheduled" else None
    return simulator.simulate(work, msgspec.structs.replace(table, topology=topology), given).step_time_us


def holding(rows: list[dict]) -> dict[str, list[str]]:
    """Models whose iterations, and whose gathers, are all within their limits, in every layout."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    return {
        "iterations": [name for name in names if all(abs(row["error"]) <= ITERATION_WITHIN for row in rows if row["model"] == name)],
        "gathers": [name for name in names if all(abs(g["error"]) <= GATHER_WITHIN for row in rows if row["model"] == name for g in row["gathers"])],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--measure-seconds", type=float, default=40)
    arguments = parser.parse_args()
    rows, machine = [], {}
    print(f"{'model':8} {'layout':6} {'run':10} {'predicted ms':>13} {'measured ms':>12} {'error':>8}   {'others':>6} {'error left':>11}   gather error, median and largest")
    for layout_name in arguments.layouts:
        for model_name in arguments.models:
            layout = LAYOUTS[layout_name]
            settings = MODELS[model_name] | layout | {"ITERS": arguments.iters, "MEASURE_SECONDS": arguments.measure_seconds}
            busy = OtherPrograms()
            run = main_job(f"benchmark-{model_name}-{layout_name}", settings)
            used = busy.processors()
            reported, groups = report(run), gathers(run, layout, arguments.measure_seconds / 4)
            machine = cost.load(run / "cost_table.json").metadata
            errors = sorted((abs(row["error"]) for row in groups))
            for kind in ("stock", "scheduled"):
                predicted, measured = reported["predicted_step_time_us"][kind], reported["step_time_us"][kind]
                left = on_what_was_left(run, kind, used)
                rows.append({
                    "model": model_name, "layout": layout_name, "run": kind, "predicted_us": predicted, "measured_us": measured,
                    "error": predicted / measured - 1, "gathers": groups, "bitwise_equal": reported["bitwise_equal"],
                    "others_processors": used, "predicted_on_what_was_left_us": left, "error_on_what_was_left": left / measured - 1,
                })  # fmt: skip
                print(
                    f"{model_name:8} {layout_name:6} {kind:10} {predicted / 1e3:13.1f} {measured / 1e3:12.1f} {predicted / measured - 1:+8.1%}   "
                    f"{used:6.1f} {left / measured - 1:+11.1%}   {median(errors):6.1%} {errors[-1]:6.1%}", flush=True,
                )  # fmt: skip
    iterations = [abs(row["error"]) for row in rows]
    errors = [abs(group["error"]) for row in rows if row["run"] == "stock" for group in row["gathers"]]
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"hardware": machine.hardware, "software": machine.software},
        "iterations_within_10_percent": f"{sum(error <= ITERATION_WITHIN for error in iterations)} of {len(iterations)}",
        "gathers_within_15_percent": f"{sum(error <= GATHER_WITHIN for error in errors)} of {len(errors)}",
        "gathers_in_interval": f"{sum(group['in_interval'] for row in rows if row['run'] == 'stock' for group in row['gathers'])} of {len(errors)}",
        "models_within": holding(rows),
        "rows": rows,
    }  # fmt: skip
    RESULT.parent.mkdir(exist_ok=True)
    files.write_atomically(RESULT, json.dumps(result, indent=1).encode() + b"\n")
    pictures.draw(RESULT)
    print(f"iterations within 10 %: {result['iterations_within_10_percent']}; gathers within 15 %: {result['gathers_within_15_percent']}, in their interval: {result['gathers_in_interval']}")
    print(f"models with all iterations within 10 %: {', '.join(result['models_within']['iterations']) or 'none'}; with all gathers within 15 %: {', '.join(result['models_within']['gathers']) or 'none'}")
    return 0 if min(map(len, result["models_within"].values())) >= 3 else 1


if __name__ == "__main__":
    sys.exit(main())
