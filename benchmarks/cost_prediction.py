"""Predicted beside measured: gather time per group and iteration time, over models and layouts.

    python benchmarks/cost_prediction.py [--models small medium large long] [--layouts pp2 dp4] [--train-seconds 24]

For every model and layout: the main job (scripts/pretrain_gpt_hybrid.sh: measure, plan, train
stock and by the schedule, report), then a second cost table, for which every group of the schedule
is gathered at its own size too, by both routes, on all ranks at once. Prints a table and writes
benchmarks/results/cost_prediction.json with date, machine and errors. Ends 0 if for three models at
least all gathers are within 15 % and all iterations within 10 %, 1 otherwise.

[Note: Two tables]
A machine that is shared becomes slower and faster by tens of percent from minute to minute, and no
table can know. ``error`` is that of the prediction which the main job printed, by the table that was
measured before training. ``error_between`` takes the mean of what the tables before and after
predict: drift that is steady cancels, what the model of the machine lacks stays. The exit code
goes by this one; both are counted, and ``tables_differ`` says by how much the two predictions do.
The second table predicts gathers from its other sizes; where a group is as large as the
largest size of the grid nothing is left to predict it from, and only the first table does.
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
from measuring import measure_command

from megatron_ext import files, simulator
from megatron_ext.cost import model as cost
from megatron_ext.cost.predict import Costs
from megatron_ext.measure.others import OtherPrograms
from megatron_ext.schedule import model as schedule
from megatron_ext.schedule import validate
from megatron_ext.workload import model as workload

ROUTES = ("gpu", "cpu")
REPOSITORY = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "cost_prediction.json"
GATHER_WITHIN, ITERATION_WITHIN = 0.15, 0.10

MODELS = {
    "small": {"LAYERS": 8, "HIDDEN": 128, "SEQ": 64, "MICRO_BATCH_SIZE": 2},
    "medium": {"LAYERS": 8, "HIDDEN": 256, "SEQ": 128, "MICRO_BATCH_SIZE": 2},
    "large": {"LAYERS": 8, "HIDDEN": 512, "SEQ": 64, "MICRO_BATCH_SIZE": 2},
    "long": {"LAYERS": 8, "HIDDEN": 384, "SEQ": 256, "MICRO_BATCH_SIZE": 2},
}
"""``small``: its steps take 5 ms, of which the code around messages and stock Megatron's pre-hooks, which no
row of the table knows, are some percent."""
SECONDS, MIN_ITERATIONS = {"small": 0.25, "medium": 0.75, "large": 1.5, "long": 2.7}, 12
"""About what an iteration takes on two processors: how many make a run as long as the others."""
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


def gathers(table: cost.CostTable, sizes: list[int]) -> dict[tuple[str, int], float]:
    """Microseconds that ``table`` measured at the groups' own sizes, by route and bytes."""
    return {(route, point.size_bytes): point.p50_us for route in ROUTES for point in getattr(table.routes, route).points if point.size_bytes in sizes}


def without(table: cost.CostTable, sizes: list[int]) -> cost.CostTable:
    """``table`` as if gathers had not been measured at ``sizes``: what is predicted must not have been seen."""
    left = {}
    for route in ROUTES:
        curve = getattr(table.routes, route)
        points = tuple(point for point in curve.points if point.size_bytes not in sizes)
        # Curves by algorithm are measured at the same sizes.
        algorithms = {name: tuple(p for p in own if p.size_bytes not in sizes) for name, own in curve.algorithms.items()}
        left[route] = msgspec.structs.replace(curve, points=points, algorithms=algorithms)
    return msgspec.structs.replace(table, routes=msgspec.structs.replace(table.routes, **left))


def model_options(run: Path) -> list[str]:
    """The options of the main job's model."""
    return (run / "model_options.txt").read_text().split()


def measure_after(run: Path, settings: dict, seconds: float, sizes: list[int]) -> cost.CostTable:
    """A second cost table, as the main job measured the first, but with gathers at ``sizes`` too."""
    out = run / "cost_table_after.json"
    work = workload.load(run / "workload.json")
    command = measure_command(out, work, model_options(run), hidden=settings["HIDDEN"], seq=settings["SEQ"], micro_batch_size=settings["MICRO_BATCH_SIZE"], seconds=seconds)
    command[2:2] = ["--also-sizes", ",".join(map(str, sizes))]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / ".megatron"), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL)
    return cost.load(out)


def gather_rows(measured: dict, table: Costs, after: Costs) -> list[dict]:
    """Every gather as the tables predict it."""
    rows = []
    for (route, size), us in measured.items():
        ends = [point.size_bytes for point in getattr(after.table.routes, route).points]
        tables = [table, after] if min(ends) <= size <= max(ends) else [table]
        found = [one.gather(route, size) for one in tables]
        between = sum(estimate.us for estimate in found) / len(found)
        rows.append({
            "route": route, "size_bytes": size, "measured_us": us, "predicted_us": found[0].us, "predicted_after_us": found[1].us if found[1:] else None,
            "error": found[0].us / us - 1, "error_between": between / us - 1,
            "in_interval": min(one.low_us for one in found) <= us <= max(one.high_us for one in found),
        })  # fmt: skip
    return rows


def holding(rows: list[dict]) -> dict[str, list[str]]:
    """Models whose iterations, and whose gathers, are all within their limits, in every layout."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    return {
        "iterations": [name for name in names if all(abs(row["error_between"]) <= ITERATION_WITHIN for row in rows if row["model"] == name)],
        "gathers": [name for name in names if all(abs(g["error_between"]) <= GATHER_WITHIN for row in rows if row["model"] == name for g in row["gathers"])],
    }  # fmt: skip


def compared(model_name: str, layout_name: str, arguments) -> tuple[list[dict], cost.Metadata]:
    """The rows of one model in one layout, stock and scheduled; and what its table says of the machine."""
    iterations = max(MIN_ITERATIONS, round(arguments.train_seconds / SECONDS[model_name]))
    settings = MODELS[model_name] | LAYOUTS[layout_name] | {"ITERS": iterations, "MEASURE_SECONDS": arguments.measure_seconds}
    busy = OtherPrograms()
    run = main_job(f"benchmark-{model_name}-{layout_name}", settings)
    used = busy.processors()
    reported, table = report(run), cost.load(run / "cost_table.json")
    sizes = sorted({group.bytes for group in schedule.decode(run / "schedule.json").groups})
    again = measure_after(run, settings, arguments.measure_seconds, sizes)
    after = without(again, sizes)
    groups = gather_rows(gathers(again, sizes), Costs(table), Costs(after))
    work, rows = workload.load(run / "workload.json"), []
    for kind in ("stock", "scheduled"):
        predicted, us = reported["predicted_step_time_us"][kind], reported["step_time_us"][kind]
        given = validate.load(run / "schedule.json") if kind == "scheduled" else None
        predicted_after = simulator.simulate(work, again, given).step_time_us
        rows.append({
            "model": model_name, "layout": layout_name, "run": kind, "iterations": iterations, "measured_us": us,
            "predicted_us": predicted, "predicted_after_us": predicted_after, "tables_differ": predicted_after / predicted - 1,
            "error": predicted / us - 1, "error_between": (predicted + predicted_after) / 2 / us - 1,
            "gathers": groups, "bitwise_equal": reported["bitwise_equal"], "others_processors": used,
        })  # fmt: skip
    return rows, table.metadata


def shares(rows: list[dict]) -> dict[str, str]:
    """How many rows are within their limits."""
    groups = [group for row in rows if row["run"] == "stock" for group in row["gathers"]]

    def within(limit: float, found: list[dict], error: str) -> str:
        return f"{sum(abs(row[error]) <= limit for row in found)} of {len(found)}"

    return {
        "iterations_within_10_percent": within(ITERATION_WITHIN, rows, "error"),
        "iterations_within_10_percent_between": within(ITERATION_WITHIN, rows, "error_between"),
        "gathers_within_15_percent": within(GATHER_WITHIN, groups, "error"),
        "gathers_within_15_percent_between": within(GATHER_WITHIN, groups, "error_between"),
        "gathers_in_interval": f"{sum(group['in_interval'] for group in groups)} of {len(groups)}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--train-seconds", type=float, default=24, help="About as long is each run trained.")
    parser.add_argument("--measure-seconds", type=float, default=40)
    arguments = parser.parse_args()
    rows, machine = [], None
    print(f"{'model':8} {'layout':6} {'run':10} {'predicted ms':>13} {'measured ms':>12} {'error':>8} {'between':>8} {'tables differ':>14}   gather error between, median and largest")
    for layout_name in arguments.layouts:
        for model_name in arguments.models:
            found, machine = compared(model_name, layout_name, arguments)
            rows += found
            errors = sorted(abs(group["error_between"]) for group in found[0]["gathers"])
            for row in found:
                print(
                    f"{model_name:8} {layout_name:6} {row['run']:10} {row['predicted_us'] / 1e3:13.1f} {row['measured_us'] / 1e3:12.1f} {row['error']:+8.1%} "
                    f"{row['error_between']:+8.1%} {row['tables_differ']:+14.1%}   {median(errors):6.1%} {errors[-1]:6.1%}", flush=True,
                )  # fmt: skip
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"hardware": machine.hardware, "software": machine.software},
        **shares(rows), "models_within": holding(rows), "rows": rows,
    }  # fmt: skip
    RESULT.parent.mkdir(exist_ok=True)
    files.write_atomically(RESULT, json.dumps(result, indent=1).encode() + b"\n")
    pictures.draw(RESULT)
    for name, share in shares(rows).items():
        print(f"{name.replace('_', ' ')}: {share}")
    print(f"models with all iterations within 10 %: {', '.join(result['models_within']['iterations']) or 'none'}; with all gathers within 15 %: {', '.join(result['models_within']['gathers']) or 'none'}")
    return 0 if min(map(len, result["models_within"].values())) >= 3 else 1


if __name__ == "__main__":
    sys.exit(main())
