"""Predicted beside measured: gather time per group and iteration time, over models and layouts.

    python benchmarks/cost_prediction.py [--models small medium large long] [--layouts pp2 dp4] [--train-seconds 24]

For every model and layout: describe, measure, plan, as the main job does (which builds the corpus:
scripts/pretrain_gpt_hybrid.sh first). Then stock and the scheduled run go in turns of seconds (in_turns.py); after
each round of turns both are stopped and a further table is measured; and gathers alone, of every group of the
schedule at its own size too, by both routes, on all ranks at once. Prints a table and writes
benchmarks/results/cost_prediction.json with date, machine and errors. Ends 0 if for three models at least all
gathers are within 15 % and all iterations within 10 %, 1 otherwise.

[Note: Several tables]
A machine that is shared becomes slower and faster by tens of percent from minute to minute, and no
table can know. ``error`` is that of the prediction by the table that was planned from. ``error_between`` takes the
mean of what all tables predict, before, between and after the turns: drift cancels, what the model of the
machine lacks stays. The exit code goes by this one; both are counted, and ``tables_differ`` says by how much
the mean differs from the first. Tables of gathers alone predict them from their other sizes; where a group is as large
as the largest size of the grid nothing is left to predict it from, and only the first table does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, median

import msgspec
import pictures
from in_turns import Run, in_turns, over_turns
from measuring import CORPUS, measure_command

from megatron_ext import files, simulator
from megatron_ext.cost import model as cost
from megatron_ext.cost.predict import Costs
from megatron_ext.report.spread import summarize
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
LATER_TABLES = 2
LAYOUTS = {"pp2": {"PP": 2, "VP": 2, "DP": 2}, "dp4": {"PP": 1, "VP": 1, "DP": 4}}


def model_options(settings: dict) -> list[str]:
    """Options of the example, as scripts/pretrain_gpt_hybrid.sh makes them of the same settings."""
    pp, dp, vp, micro = settings["PP"], settings["DP"], settings["VP"], settings["MICRO_BATCH_SIZE"]
    options = {
        "num-layers": settings["LAYERS"], "hidden-size": settings["HIDDEN"], "num-attention-heads": 4, "seq-length": settings["SEQ"],
        "micro-batch-size": micro, "global-batch-size": micro * dp * 2 * pp, "pipeline-model-parallel-size": pp, "data-parallel-size": dp,
    } | ({"num-virtual-stages-per-pipeline-rank": vp} if vp > 1 else {})  # fmt: skip
    return [word for name, value in options.items() for word in (f"--{name}", str(value))] + ["--untie-embeddings-and-output-weights"]


def product(*arguments: object) -> None:
    """``megatron-ext ARGUMENTS...``"""
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / '.megatron'}", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments[1]} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")


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


def gather_rows(first: cost.CostTable, later: list[cost.CostTable], sizes: list[int]) -> list[dict]:
    """Every gather as the tables predict it; the later ones, of gathers alone, measured it."""
    measured = [gathers(table, sizes) for table in later]
    rows, known = [], Costs(first)
    for route, size in measured[0]:
        us = mean(times[route, size] for times in measured)
        found = [known.gather(route, size)]
        for table in later:
            others = without(table, sizes)
            ends = [point.size_bytes for point in getattr(others.routes, route).points]
            if min(ends) <= size <= max(ends):
                found.append(Costs(others).gather(route, size))
        rows.append({
            "route": route, "size_bytes": size, "measured_us": us, "predicted_us": found[0].us, "predicted_later_us": [estimate.us for estimate in found[1:]],
            "error": found[0].us / us - 1, "error_between": mean(estimate.us for estimate in found[1:] or found) / us - 1,
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


def compared(model_name: str, layout_name: str, folder: Path, arguments) -> tuple[list[dict], cost.Metadata]:
    """The rows of one model in one layout, stock and scheduled; and what its table says of the machine."""
    settings = MODELS[model_name] | LAYOUTS[layout_name]
    model, world = model_options(settings), settings["PP"] * settings["DP"]
    product("megatron_ext", "describe", "--out", folder / "workload.json", *model)
    work = workload.load(folder / "workload.json")

    def measure(out: Path, seconds: float, links: str | None = None, also_sizes: list[int] | None = None) -> cost.CostTable:
        command = measure_command(out, work, model, hidden=settings["HIDDEN"], seq=settings["SEQ"], micro_batch_size=settings["MICRO_BATCH_SIZE"], seconds=seconds, links=links)
        product(*command[:2], *(["--also-sizes", ",".join(map(str, also_sizes))] if also_sizes else []), *command[2:])
        return cost.load(out)

    table = measure(folder / "cost_table.json", arguments.measure_seconds)
    product("megatron_ext", "plan", "--cost-table", folder / "cost_table.json", "--workload", folder / "workload.json", "--out", folder / "schedule.json")
    given = validate.load(folder / "schedule.json")
    sizes = sorted({group.bytes for group in given.groups})

    turn_s = max(arguments.turn, 4 * SECONDS[model_name])  # holds iterations that were not stopped
    iterations = max(MIN_ITERATIONS, round(arguments.train_seconds / SECONDS[model_name]))
    runs = {}
    for kind, more in {"stock": [], "scheduled": ["--user-defined-schedule", str(folder / "schedule.json")]}.items():
        command = ["examples/pretrain_gpt_hybrid.py", *model, "--data-path", CORPUS, "--train-iters", str(iterations), "--metrics-path", str(folder / f"{kind}.metrics.json"), *more]
        runs[kind] = Run(kind, command, world, folder / f"{kind}.log")
    later, of_gathers = [], []

    def measure_again(number: int) -> None:
        if number % len(runs) == len(runs) - 1 and len(later) < LATER_TABLES:
            later.append(measure(folder / f"cost_table_{number}.json", arguments.measure_seconds))
            of_gathers.append(measure(folder / f"gathers_{number}.json", arguments.gather_seconds, links=",".join(ROUTES), also_sizes=sizes))

    in_turns(list(runs.values()), turn_s, between=measure_again)
    groups, rows = gather_rows(table, of_gathers, sizes), []
    for kind in ("stock", "scheduled"):
        schedule_of_run = given if kind == "scheduled" else None
        predicted = [simulator.simulate(work, one, schedule_of_run).step_time_us for one in (table, *later)]
        iteration_us = files.load(folder / f"{kind}.metrics.json", dict)["iteration_us"]
        measured = summarize(over_turns(runs[kind], iteration_us, iteration_us, turn_s).values)
        rows.append({
            "model": model_name, "layout": layout_name, "run": kind, "measured_us": measured.median_us, "measured": measured.as_json(),
            "predicted_us": predicted[0], "predicted_later_us": predicted[1:], "tables_differ": mean(predicted) / predicted[0] - 1,
            "error": predicted[0] / measured.median_us - 1, "error_between": mean(predicted) / measured.median_us - 1, "gathers": groups,
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


def save(rows: list[dict], machine: cost.Metadata) -> dict:
    """Write what there is so far: a run of many configurations may be ended before its last."""
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"hardware": machine.hardware, "software": machine.software},
        **shares(rows), "models_within": holding(rows), "rows": rows,
    }  # fmt: skip
    RESULT.parent.mkdir(exist_ok=True)
    files.write_atomically(RESULT, json.dumps(result, indent=1).encode() + b"\n")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--train-seconds", type=float, default=24, help="About as long is each run trained.")
    parser.add_argument("--measure-seconds", type=float, default=40)
    parser.add_argument("--gather-seconds", type=float, default=20, help="Of each measurement of gathers alone.")
    parser.add_argument("--turn", type=float, default=20, help="Least seconds of a turn; the first holds the start.")
    arguments = parser.parse_args()
    rows, machine = [], None
    print(f"{'model':8} {'layout':6} {'run':10} {'predicted ms':>13} {'measured ms':>12} {'error':>8} {'between':>8} {'tables differ':>14}   gather error between, median and largest")
    for layout_name in arguments.layouts:
        for model_name in arguments.models:
            with tempfile.TemporaryDirectory() as folder:
                found, machine = compared(model_name, layout_name, Path(folder), arguments)
            rows += found
            save(rows, machine)
            errors = sorted(abs(group["error_between"]) for group in found[0]["gathers"])
            for row in found:
                print(
                    f"{model_name:8} {layout_name:6} {row['run']:10} {row['predicted_us'] / 1e3:13.1f} {row['measured_us'] / 1e3:12.1f} {row['error']:+8.1%} "
                    f"{row['error_between']:+8.1%} {row['tables_differ']:+14.1%}   {median(errors):6.1%} {errors[-1]:6.1%}", flush=True,
                )  # fmt: skip
    result = save(rows, machine)
    pictures.draw(RESULT)
    for name, share in shares(rows).items():
        print(f"{name.replace('_', ' ')}: {share}")
    print(f"models with all iterations within 10 %: {', '.join(result['models_within']['iterations']) or 'none'}; with all gathers within 15 %: {', '.join(result['models_within']['gathers']) or 'none'}")
    return 0 if min(map(len, result["models_within"].values())) >= 3 else 1


if __name__ == "__main__":
    sys.exit(main())
