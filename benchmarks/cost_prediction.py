"""Predicted beside measured: gather time per group and iteration time, over models and layouts.

    python benchmarks/cost_prediction.py [--models small medium large long] [--layouts pp2 dp4] [--train-seconds 60]

For every model and layout: describe, measure, plan, as the main job does (which builds the corpus:
scripts/pretrain_gpt_hybrid.sh first). Then stock, the scheduled run and the measuring of compute are interleaved in
time slices of seconds (interleaved_ab.py); between rounds of slices, with all stopped, gathers are measured by both
routes on all ranks at once, of every group of the schedule at its own size too. Prints a table and writes
benchmarks/results/cost_prediction.json with date, machine and errors. Ends 0 if for three models at least all
gathers are within 15 % and all iterations within 10 %, 1 otherwise.

[Note: An interleaved table]
A machine that is shared becomes slower and faster by tens of percent, for seconds and for minutes, and no table can
know. ``error`` is that of the prediction by the table that was planned from, of minutes before. ``error_interleaved``
is by the same with compute and optimizer as they were measured interleaved with the runs, so in the same minutes: what
the machine does by itself is less in it. The exit code goes by ``error``, which is what the product says; both are
counted.

[Note: Gathers]
They are timed beside nothing else, in the surroundings of a run: the model and its process groups are there (which
makes them up to a fifth slower). What is measured at the groups' own sizes is predicted by the table that was planned
from (``error``; it holds the sizes of likely groups, as the main job's does), and from all other sizes of the same
measurement, up to twice the largest group's (``error_by_other_sizes``; the exit code goes by this one).
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
from interleaved_ab import Run, interleave, over_slices
from measuring import PROCESSORS_LINKS, STRETCH, interleaved_and_before, measure_command, training_command

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.estimates import Costs
from megatron_ext.formats import json_files
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.report.spread import summarize
from megatron_ext.schedule import validate
from megatron_ext.workload import workload

ROUTES = ("gpu", "cpu")
GATHER_LINKS = (*ROUTES, "compute")
"""Compute for its surroundings, see [Note: Gathers]."""
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
TABLES_OF_GATHERS = 2
LAYOUTS = {"pp2": {"PP": 2, "VP": 2, "DP": 2}, "dp4": {"PP": 1, "VP": 1, "DP": 4}}


def model_options(settings: dict) -> list[str]:
    """Options of the example, as scripts/pretrain_gpt_hybrid.sh makes them of the same settings."""
    pp, dp, vp, micro = settings["PP"], settings["DP"], settings["VP"], settings["MICRO_BATCH_SIZE"]
    options = {
        "num-layers": settings["LAYERS"],
        "hidden-size": settings["HIDDEN"],
        "num-attention-heads": 4,
        "seq-length": settings["SEQ"],
        "micro-batch-size": micro,
        "global-batch-size": micro * dp * 2 * pp,
        "pipeline-model-parallel-size": pp,
        "data-parallel-size": dp,
    } | ({"num-virtual-stages-per-pipeline-rank": vp} if vp > 1 else {})
    return [word for name, value in options.items() for word in (f"--{name}", str(value))] + [
        "--untie-embeddings-and-output-weights"
    ]


def product(*arguments: object) -> None:
    """``megatron-ext ARGUMENTS...``"""
    environment = os.environ | {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / '.megatron'}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{arguments[1]} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")


def gathers(table: cost.CostTable, sizes: list[int]) -> dict[tuple[str, int], float]:
    """Microseconds that ``table`` measured at the groups' own sizes, by route and bytes."""
    return {
        (route, point.size_bytes): point.p50_us
        for route in ROUTES
        for point in getattr(table.routes, route).points
        if point.size_bytes in sizes
    }


def without(table: cost.CostTable, sizes: list[int]) -> cost.CostTable:
    """``table`` as if gathers had not been measured at ``sizes``: what is predicted must not have been seen."""
    left = {}
    for route in ROUTES:
        curve = getattr(table.routes, route)
        points = tuple(point for point in curve.points if point.size_bytes not in sizes)
        # Curves by algorithm are measured at the same sizes.
        algorithms = {
            name: tuple(p for p in own if p.size_bytes not in sizes) for name, own in curve.algorithms.items()
        }
        left[route] = msgspec.structs.replace(curve, points=points, algorithms=algorithms)
    return msgspec.structs.replace(table, routes=msgspec.structs.replace(table.routes, **left))


def gather_rows(first: cost.CostTable, later: list[cost.CostTable], sizes: list[int]) -> list[dict]:
    """Every gather as the tables predict it; the later ones, of gathers, measured it."""
    measured = [gathers(table, sizes) for table in later]
    rows, known = [], [Costs(table) for table in (first, *(without(table, sizes) for table in later))]
    for route, size in measured[0]:
        us = mean(times[route, size] for times in measured)
        found = [table.gather(route, size) for table in known]
        rows.append(
            {
                "route": route,
                "size_bytes": size,
                "measured_us": us,
                "measured_by_table_us": [times[route, size] for times in measured],
                "predicted_us": found[0].us,
                "predicted_by_other_sizes_us": [estimate.us for estimate in found[1:]],
                "error": found[0].us / us - 1,
                "error_by_other_sizes": mean(estimate.us for estimate in found[1:]) / us - 1,
                "in_interval": min(one.low_us for one in found) <= us <= max(one.high_us for one in found),
            }
        )
    return rows


def holding(rows: list[dict]) -> dict[str, list[str]]:
    """Models whose iterations, and whose gathers, are all within their limits, in every layout."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    return {
        "iterations": [
            name for name in names if all(abs(row["error"]) <= ITERATION_WITHIN for row in rows if row["model"] == name)
        ],
        "gathers": [
            name
            for name in names
            if all(
                abs(g["error_by_other_sizes"]) <= GATHER_WITHIN
                for row in rows
                if row["model"] == name
                for g in row["gathers"]
            )
        ],
    }


def compared(model_name: str, layout_name: str, folder: Path, arguments) -> tuple[list[dict], cost.Metadata]:
    """The rows of one model in one layout, stock and scheduled; and what its table says of the machine."""
    settings = MODELS[model_name] | LAYOUTS[layout_name]
    model, world = model_options(settings), settings["PP"] * settings["DP"]
    product("megatron_ext", "describe", "--out", folder / "workload.json", *model)
    work = workload.load(folder / "workload.json")

    shape = {"hidden": settings["HIDDEN"], "seq": settings["SEQ"], "micro_batch_size": settings["MICRO_BATCH_SIZE"]}

    def measure(out: Path, seconds: float, **which) -> cost.CostTable:
        product(*measure_command(out, work, model, **shape, seconds=seconds, **which))
        return cost.load(out)

    table = measure(folder / "cost_table.json", arguments.measure_seconds)
    product(
        "megatron_ext",
        "plan",
        "--cost-table",
        folder / "cost_table.json",
        "--workload",
        folder / "workload.json",
        "--out",
        folder / "schedule.json",
    )
    given = validate.load(folder / "schedule.json")
    sizes = sorted({group.bytes for group in given.groups})

    # Holds iterations that were not stopped; short, so that all meet the same machine.
    slice_s = max(arguments.slice, 4 * SECONDS[model_name])
    iterations = max(MIN_ITERATIONS, round(arguments.train_seconds / SECONDS[model_name]))
    runs = {}
    for kind, more in {"stock": [], "scheduled": ["--user-defined-schedule", str(folder / "schedule.json")]}.items():
        command = training_command(model, iterations, folder / f"{kind}.metrics.json", *more)
        runs[kind] = Run(kind, command, world, folder / f"{kind}.log")
    interleaved_path = folder / "cost_table_interleaved.json"
    runs["measuring"] = Run(
        "measuring",
        [
            "-m",
            *measure_command(
                interleaved_path, work, model, **shape, seconds=arguments.seconds_interleaved, links=PROCESSORS_LINKS
            ),
        ],
        world,
        folder / "measuring.log",
        stretch=STRETCH,
    )
    of_gathers = []

    def measure_gathers(number: int) -> None:
        if number % len(runs) == len(runs) - 1 and len(of_gathers) < TABLES_OF_GATHERS:
            of_gathers.append(
                measure(
                    folder / f"gathers_{number}.json",
                    arguments.gather_seconds,
                    links=",".join(GATHER_LINKS),
                    also_sizes=sizes,
                    max_bytes=2 * max(sizes),
                )
            )

    interleave(list(runs.values()), slice_s, between=measure_gathers)
    beside = interleaved_and_before(cost.load(interleaved_path), table)
    groups, rows = gather_rows(table, of_gathers, sizes), []
    for kind in ("stock", "scheduled"):
        predicted, predicted_interleaved = (
            evaluate(work, one, given if kind == "scheduled" else None).iteration_time_us for one in (table, beside)
        )
        iteration_us = json_files.load(folder / f"{kind}.metrics.json", dict)["iteration_us"]
        measured = summarize(over_slices(runs[kind], iteration_us, iteration_us, slice_s).values)
        rows.append(
            {
                "model": model_name,
                "layout": layout_name,
                "run": kind,
                "measured_us": measured.median_us,
                "measured": measured.as_json(),
                "predicted_us": predicted,
                "predicted_interleaved_us": predicted_interleaved,
                "error": predicted / measured.median_us - 1,
                "error_interleaved": predicted_interleaved / measured.median_us - 1,
                "gathers": groups,
            }
        )
    return rows, table.metadata


def shares(rows: list[dict]) -> dict[str, str]:
    """How many rows are within their limits."""
    groups = [group for row in rows if row["run"] == "stock" for group in row["gathers"]]

    def within(limit: float, found: list[dict], error: str) -> str:
        return f"{sum(abs(row[error]) <= limit for row in found)} of {len(found)}"

    return {
        "iterations_within_10_percent": within(ITERATION_WITHIN, rows, "error"),
        "iterations_within_10_percent_interleaved": within(ITERATION_WITHIN, rows, "error_interleaved"),
        "gathers_within_15_percent": within(GATHER_WITHIN, groups, "error"),
        "gathers_within_15_percent_by_other_sizes": within(GATHER_WITHIN, groups, "error_by_other_sizes"),
        "gathers_in_interval": f"{sum(group['in_interval'] for group in groups)} of {len(groups)}",
    }


def save(rows: list[dict], machine: cost.Metadata) -> dict:
    """Write what there is so far: a run of many configurations may be ended before its last."""
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"hardware": machine.hardware, "software": machine.software},
        **shares(rows),
        "models_within": holding(rows),
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    json_files.write_atomically(RESULT, json.dumps(result, indent=1).encode() + b"\n")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--train-seconds", type=float, default=60, help="About as long is each run trained.")
    parser.add_argument("--measure-seconds", type=float, default=90)
    parser.add_argument(
        "--seconds-interleaved",
        type=float,
        default=120,
        help="Of the table measured interleaved, the slices of the others included.",
    )
    parser.add_argument("--gather-seconds", type=float, default=30, help="Of each measurement of gathers.")
    parser.add_argument(
        "--slice", type=float, default=7, help="Least seconds of a slice; the first ones hold the start."
    )
    arguments = parser.parse_args()
    rows, machine = [], None
    print(
        f"{'model':8} {'layout':6} {'run':10} {'predicted ms':>13} {'interleaved':>9} {'measured ms':>12} "
        f"{'error':>8} {'interleaved':>9}   gather error by other sizes, median and largest"
    )
    for model_name in arguments.models:
        for layout_name in arguments.layouts:
            with tempfile.TemporaryDirectory() as folder:
                found, machine = compared(model_name, layout_name, Path(folder), arguments)
            rows += found
            save(rows, machine)
            errors = sorted(abs(group["error_by_other_sizes"]) for group in found[0]["gathers"])
            for row in found:
                print(
                    f"{model_name:8} {layout_name:6} {row['run']:10} {row['predicted_us'] / 1e3:13.1f} "
                    f"{row['predicted_interleaved_us'] / 1e3:9.1f} {row['measured_us'] / 1e3:12.1f} "
                    f"{row['error']:+8.1%} {row['error_interleaved']:+9.1%}   {median(errors):6.1%} {errors[-1]:6.1%}",
                    flush=True,
                )
    result = save(rows, machine)
    pictures.draw(RESULT)
    for name, share in shares(rows).items():
        print(f"{name.replace('_', ' ')}: {share}")
    print(
        f"models with all iterations within 10 %: {', '.join(result['models_within']['iterations']) or 'none'}; with "
        f"all gathers within 15 %: {', '.join(result['models_within']['gathers']) or 'none'}"
    )
    return 0 if min(map(len, result["models_within"].values())) >= 3 else 1


if __name__ == "__main__":
    sys.exit(main())
