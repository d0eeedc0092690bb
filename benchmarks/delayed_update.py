"""The delayed parameter update: what of the host's step it hides, and what it costs in loss.

    .venv/bin/python benchmarks/delayed_update.py [--rounds 3] [--iters 12] [--loss-iters 500] [--seeds 2] [--only PART]

One rank trains a GPT with the optimizer on the host, by a plan from costs that are measured just before: with every
update at once, and with every update delayed, in turns. The trace says how long the host steps and publishes, and for
how long the training thread waits for that or applies it. Predictions are simulated on the measured costs.
Then two ranks train a small GPT on the corpus: with every update at once (which is stock Megatron's training), with
updates delayed behind the first 50 iterations, and from the first iteration on; the same batches for all three.
Writes benchmarks/results/delayed_update.json and its picture; with --only the other part stays as it was.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

import pictures
from machine import about_this_machine
from main_job import train
from measuring import ROOT, describe, measure_command
from msgspec.structs import replace

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats import trace as traces
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.simulator.timing import Timing

HIDDEN, SEQ = 512, 64
SIZES = f"--num-layers 4 --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQ} --micro-batch-size 1"
MODEL = [*SIZES.split(), "--global-batch-size", "2", "--bf16", "--untie-embeddings-and-output-weights"]
MODEL += ["--optimizer-cpu-offload", "--data-parallel-size", "1"]
WARM_UP = 3
"""Iterations of a run that do not count."""

LOSS_SIZES = "--num-layers 3 --hidden-size 96 --num-attention-heads 4 --seq-length 64 --micro-batch-size 8"
LOSS_MODEL = [*LOSS_SIZES.split(), "--global-batch-size", "16", "--bf16", "--untie-embeddings-and-output-weights"]
LOSS_MODEL += ["--optimizer-cpu-offload", "--data-parallel-size", "2"]
DELAYS = {"at once": [], "after 50": ["50"], "from the first": ["0"]}
LAST = 50
"""Iterations at the end whose mean loss is compared."""


def losses(folder: Path, iterations: int, seeds: int) -> list[dict]:
    """One row a seed: losses of every iteration by name in ``DELAYS``."""
    work = describe(folder / "loss.workload.json", LOSS_MODEL, 1, None)
    schedule_file.save(folder / "loss.schedule.json", stock_schedule(work))
    by_schedule = ["--user-defined-schedule", str(folder / "loss.schedule.json"), "--log-interval", "100"]
    rows = []
    for seed in range(1, seeds + 1):
        row = {"seed": seed, "loss": {}}
        for name, delay in DELAYS.items():
            more = [*by_schedule, "--seed", str(seed), *(["--delayed-parameter-update", *delay] if delay else [])]
            row["loss"][name] = train([*LOSS_MODEL, *more], folder, f"loss{seed}", iterations, 2)["loss"]
            print(f"seed {seed}, {name}: {mean(row['loss'][name][-LAST:]):.4f}", flush=True)
        row["last"] = {name: mean(values[-LAST:]) for name, values in row["loss"].items()}
        rows.append(row)
    return rows


def hidden(folder: Path, rounds: int, iterations: int, seconds: float) -> dict:
    """Measured and simulated: iteration times with every update at once and delayed, and the trace's shares."""
    work = describe(folder / "one.workload.json", MODEL, 3, None)
    command = measure_command(
        folder / "one.cost_table.json", work, MODEL, hidden=HIDDEN, seq=SEQ, micro_batch_size=1, seconds=seconds
    )
    command.insert(command.index("--modules"), "--optimizer-on-host")
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env=environment(), stdout=sys.stderr)
    table = cost.load(folder / "one.cost_table.json")
    schedule = plan(work, table, policy="all-cpu", extrapolate=True)
    schedule_file.save(folder / "one.schedule.json", schedule)
    works = {name: replace(work, optimizer=replace(work.optimizer, delayed=name == "delayed")) for name in RULES}
    predicted = {name: evaluate(own, table, schedule, extrapolate=True, trace=True) for name, own in works.items()}
    times, spans = defaultdict(list), defaultdict(list)
    for number in range(rounds):
        for name in list(RULES)[:: -1 if number % 2 else 1]:
            trace = folder / f"{name}.trace.json"
            more = ["--user-defined-schedule", str(folder / "one.schedule.json"), *RULES[name]]
            more += ["--user-defined-schedule-trace", str(trace)]
            times[name] += train([*MODEL, *more], folder, name, iterations, 1)["iteration_us"][WARM_UP:]
            if name == "delayed":
                by_iteration = defaultdict(lambda: defaultdict(float))
                for event in traces.load(trace)[0]:
                    by_iteration[event.iteration][event.lane, event.name.partition(" ")[0]] += event.duration_us
                spans[name] += [by_iteration[i] for i in sorted(by_iteration) if i > WARM_UP]
    host = {"step": median(row["host_step", "delayed"] for row in spans["delayed"])}
    host["publish"] = median(sum(us for (lane, _), us in row.items() if lane == "publish") for row in spans["delayed"])
    left = {what: median(row["issue", what] for row in spans["delayed"]) for what in ("wait", "apply", "end")}
    left["compute waits"] = median(
        sum(us for (lane, _), us in row.items() if lane == "wait") for row in spans["delayed"]
    )
    measured = {name: median(own) for name, own in times.items()}
    simulated = dict.fromkeys(("host_step", "publish", "wait"), 0.0)
    for event in predicted["delayed"].events or []:
        if event.lane in simulated:
            simulated[event.lane] += event.duration_us
    size = sum(p.bytes for chunk in work.chunks for p in chunk.parameters)
    apply_us = Timing(works["delayed"], table, extrapolate=True).to_host_us(size)[0]
    return {
        "parameters": sum(p.numel for chunk in work.chunks for p in chunk.parameters),
        "iteration_us": measured,
        "predicted_us": {name: result.iteration_time_us for name, result in predicted.items()},
        "host_us": host,
        "exposed_us": left,
        "hidden_step": 1.0 - (left["wait"] + left["apply"]) / (host["step"] + left["apply"]),
        "hidden": 1.0 - sum(left.values()) / (sum(host.values()) + left["apply"]),
        "predicted_hidden": 1.0
        - (simulated["wait"] + apply_us) / (simulated["host_step"] + simulated["publish"] + apply_us),
        "ratio": measured["delayed"] / measured["at once"],
        "predicted_ratio": predicted["delayed"].iteration_time_us / predicted["at once"].iteration_time_us,
    }


RULES = {"at once": [], "delayed": ["--delayed-parameter-update", "0"]}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / ".megatron"), "PYTHONWARNINGS": "ignore"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--measure-seconds", type=float, default=40)
    parser.add_argument("--loss-iters", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", default="benchmarks/results/delayed_update.json")
    parser.add_argument("--only", choices=("step", "losses"))
    args = parser.parse_args()
    about = about_this_machine(load_before=os.getloadavg()[0])
    kept = json_files.load(args.out, dict) if args.only and Path(args.out).exists() else {}
    step, rows = kept.get("step"), kept.get("losses")
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "losses":
            step = hidden(Path(folder), args.rounds, args.iters, args.measure_seconds)
            print(step, flush=True)
        if args.only != "step":
            rows = losses(Path(folder), args.loss_iters, args.seeds)
    result = {
        "command": f"python benchmarks/delayed_update.py --rounds {args.rounds} --iters {args.iters} "
        f"--loss-iters {args.loss_iters} --seeds {args.seeds}",
        "machine": about,
        "step": step,
        "losses": rows,
    }
    json_files.save(args.out, result, indent=1)
    if rows:
        pictures.draw(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
