"""What the delayed parameter update costs in loss.

    .venv/bin/python benchmarks/delayed_update.py [--iters 500] [--seeds 2]

Two ranks train a small GPT on the corpus with the optimizer on the host: with every update at once (which is stock
Megatron's training), with updates delayed behind the first 50 iterations, and from the first iteration on; the same
batches for all three. Writes benchmarks/results/delayed_update.json and its picture.
"""

import os
import sys
import tempfile
from pathlib import Path
from statistics import mean

import machine
from main_job import train
from measuring import describe

from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule import user_defined_schedule as schedule_file

SIZES = "--num-layers 3 --hidden-size 96 --num-attention-heads 4 --seq-length 64 --micro-batch-size 8"
MODEL = [*SIZES.split(), "--global-batch-size", "16", "--bf16", "--untie-embeddings-and-output-weights"]
MODEL += ["--optimizer-cpu-offload", "--data-parallel-size", "2"]
DELAYS = {"at once": [], "after 50": ["50"], "from the first": ["0"]}
LAST = 50
"""Iterations at the end whose mean loss is compared."""


def losses(folder: Path, iterations: int, seeds: int) -> list[dict]:
    """One row a seed: losses of every iteration by name in ``DELAYS``."""
    work = describe(folder / "loss.workload.json", MODEL, 1, None)
    schedule_file.save(folder / "loss.schedule.json", stock_schedule(work))
    by_schedule = ["--user-defined-schedule", str(folder / "loss.schedule.json"), "--log-interval", "100"]
    rows = []
    for seed in range(1, seeds + 1):
        row = {"seed": seed, "loss": {}}
        for name, delay in DELAYS.items():
            more = [*by_schedule, "--seed", str(seed), *(["--delayed-parameter-update", *delay] if delay else [])]
            row["loss"][name] = train([*MODEL, *more], folder, f"loss{seed}", iterations, 2)["loss"]
            print(f"seed {seed}, {name}: {mean(row['loss'][name][-LAST:]):.4f}", flush=True)
        row["last"] = {name: mean(values[-LAST:]) for name, values in row["loss"].items()}
        rows.append(row)
    return rows


def main() -> int:
    args = machine.options(__doc__, iters=500, seeds=2, out="benchmarks/results/delayed_update.json")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = losses(Path(folder), args.iters, args.seeds)
    command = f"python benchmarks/delayed_update.py --iters {args.iters} --seeds {args.seeds}"
    machine.write(args.out, {"command": command, "losses": rows}, load_before=load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
