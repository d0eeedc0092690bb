"""The main job, measured: scheduled beside stock in interleaved time slices, and equality of policies.

    bash scripts/pretrain_gpt_hybrid.sh
    .venv/bin/python benchmarks/main_job.py runs/NAME [--iters 80] [--parity-iters 50]

Stock Megatron (as shipped) and the scheduled run are interleaved in time slices of seconds
(benchmarks/interleaved_ab.py), so that a machine that changes its speed changes it for both. Equality compares each
policy, with delays put into publishing and copying, with Megatron's own gather at the policy's bucket layout.
Writes benchmarks/results/main_job.json.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import faults
import machine
from interleaved_ab import Ratio, Run, interleave, over_slices, ratio_of, ratios_to
from measuring import training_command
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext import planner
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.launch.launcher import launch
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.report.spread import summarize
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.workload import workload as workload_file

POLICIES = ("hybrid", "all-gpu", "all-cpu", "random:0", "random:1", "random:2", "random:3", "random:4")
DELAYS = "publish_delay_ms=10,copy_delay_ms=5,seed=7"


def train(options: list[str], folder: Path, name: str, iterations: int, world: int, *more: str, env=None) -> dict:
    """One training run; returns its metrics. Raises RuntimeError if it fails."""
    with open(folder / f"{name}.log", "w") as log:
        code = launch(
            [sys.executable, *training_command(options, iterations, folder / f"{name}.metrics.json", *more)],
            world,
            environment={"PYTHONPATH": str(ROOT / ".megatron"), "PYTHONWARNINGS": "ignore", **(env or {})},
            log=log,
        )
    if code != 0:
        raise RuntimeError(f"{name} ended with exit code {code}; see {folder / name}.log")
    return json_files.load(folder / f"{name}.metrics.json", dict)


def timing(
    options, folder: Path, run_dir: Path, iterations: int, slice_s: float, world: int, parallel, bar
) -> tuple[dict, Ratio]:
    """Gather, exposed and iteration time of stock and scheduled runs in interleaved time slices, and the
    iteration time's ratio at the same time."""
    traces = {kind: folder / f"{kind}.trace.json" for kind in ("stock", "scheduled")}
    runs = {}
    for kind, path in traces.items():
        more = ["--user-defined-schedule", str(run_dir / "schedule.json")] if kind == "scheduled" else []
        runs[kind] = Run(
            kind,
            training_command(
                options, iterations, folder / f"{kind}.metrics.json", "--user-defined-schedule-trace", str(path), *more
            ),
            world,
            folder / f"{kind}.log",
        )
    task = bar.add_task("stock and scheduled interleaved", total=None)
    interleave(
        list(runs.values()),
        slice_s,
        report=lambda number: bar.update(task, description=f"stock and scheduled: slice {number + 1}"),
    )
    figures = {}
    for kind, run in runs.items():
        us, measured = (
            json_files.load(folder / f"{kind}.metrics.json", dict)["iteration_us"],
            MeasuredTrace(traces[kind], parallel, iterations),
        )
        by_name = {
            "gather_us": measured.thread_us(("issue", "wait")),
            "exposed_us": measured.thread_us(("wait",)),
            "iteration_time_us": us,
        }
        figures[kind] = {name: over_slices(run, us, figure, slice_s) for name, figure in by_name.items()}
    ratio = ratio_of(
        ratios_to(figures["stock"]["iteration_time_us"].of_slice, figures["scheduled"]["iteration_time_us"].of_slice)
    )
    return {
        kind: {name: summarize(figure.values)._asdict() for name, figure in mine.items()}
        for kind, mine in figures.items()
    }, ratio


def parity(options, folder: Path, run_dir: Path, iterations: int, world: int, bar) -> list[dict]:
    """Every policy against Megatron's own gather at its layout: bitwise or not."""
    workload, table = workload_file.load(run_dir / "workload.json"), cost.load(run_dir / "cost_table.json")
    task = bar.add_task(f"equality over {iterations} iterations", total=2 * len(POLICIES))
    rows = []
    for policy in POLICIES:
        path = folder / f"{policy.replace(':', '-')}.json"
        schedule_file.save(path, planner.plan(workload, table, policy=policy))
        results = []
        for env in ({"MEGATRON_EXT_STOCK_GATHER": "1"}, faults.asked(DELAYS, str(ROOT / ".megatron"))):
            results.append(
                train(options, folder, path.stem, iterations, world, "--user-defined-schedule", str(path), env=env)
            )
            bar.advance(task)
        reference, scheduled = results
        rows.append(
            {"policy": policy, "iterations": iterations, "groups": len(schedule_file.read_unchecked(path).groups)}
            | {name: reference[name] == scheduled[name] for name in ("loss", "grad_norm", "parameter_sha256")}
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--iters", type=int, default=80)
    parser.add_argument("--slice", type=float, default=5, help="seconds of a slice")
    parser.add_argument("--parity-iters", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "main_job.json")
    args = parser.parse_args()
    os.chdir(ROOT)
    run_dir = args.run_dir
    options = (run_dir / "model_options.txt").read_text().splitlines()
    workload, table = workload_file.load(run_dir / "workload.json"), cost.load(run_dir / "cost_table.json")
    parallel = workload.parallel
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, Progress(console=Console(stderr=True)) as bar:
        folder = Path(temporary)
        times, ratio = timing(options, folder, run_dir, args.iters, args.slice, parallel.world_size, parallel, bar)
        equal = parity(options, folder, run_dir, args.parity_iters, parallel.world_size, bar)
    predicted = {
        "stock": evaluate(workload, table).iteration_time_us,
        "scheduled": validate.load(run_dir / "schedule.json").predicted.iteration_time_us,
    }
    ratios = {
        name: times["scheduled"][name]["median_us"] / times["stock"][name]["median_us"]
        for name in ("gather_us", "exposed_us")
    } | {"iteration_time_us": ratio.median}
    result = {
        "options": options,
        "times": times,
        "ratio_scheduled_to_stock": ratios,
        "iteration_time_of_slices": ratio._asdict(),
        "predicted_iteration_time_us": predicted,
        "prediction_error": {
            kind: predicted[kind] / times[kind]["iteration_time_us"]["median_us"] - 1 for kind in predicted
        },
        "equality": equal,
        "delays": DELAYS,
    }
    machine.write(args.out, result, load_before=before)
    show(result)
    return 0 if all(row["loss"] and row["grad_norm"] and row["parameter_sha256"] for row in equal) else 1


def show(result: dict) -> None:
    console = Console()
    table = Table("figure", "stock, ms", "scheduled, ms", "ratio", title="medians (p10 - p90)")
    for name, ratio in result["ratio_scheduled_to_stock"].items():
        cells = [
            f"{t['median_us'] / 1e3:.2f} ({t['p10_us'] / 1e3:.2f} - {t['p90_us'] / 1e3:.2f})"
            for t in (result["times"][kind][name] for kind in ("stock", "scheduled"))
        ]
        of_slices = result["iteration_time_of_slices"]
        table.add_row(
            name,
            *cells,
            f"{ratio:.3f}" + (f" (+- {2 * of_slices['standard_error']:.3f})" if name == "iteration_time_us" else ""),
        )
    predicted = result["predicted_iteration_time_us"]
    table.add_row(
        "predicted iteration time",
        *(f"{predicted[kind] / 1e3:.2f} ({result['prediction_error'][kind]:+.1%})" for kind in ("stock", "scheduled")),
        "",
    )
    console.print(table)
    table = Table(
        "policy",
        "groups",
        "iterations",
        "losses",
        "gradient norms",
        "parameters",
        title="bitwise equal to Megatron's own gather at the same layout",
    )
    for row in result["equality"]:
        table.add_row(
            row["policy"],
            str(row["groups"]),
            str(row["iterations"]),
            *("equal" if row[name] else "DIFFERENT" for name in ("loss", "grad_norm", "parameter_sha256")),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
