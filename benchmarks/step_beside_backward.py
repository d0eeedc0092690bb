"""How much of the host's optimizer step and of publishing is hidden beside the backward, without any delay.

    .venv/bin/python benchmarks/step_beside_backward.py [--rounds 2] [--iters 10]

Two pipeline ranks with two chunks each train a GPT with 8 micro-batches and the optimizer on the host, every group from
its host copy. By turns the step waits for the gradient norm, and is made beside the backward (`rollback_bytes`), where
nothing is clipped. From the traces of the second kind: hidden is the time of steps and publishing in which the training
thread is neither in the optimizer nor waits for a group; the rest of these, and all other time in the optimizer, is
not hidden. Losses of all are equal, or this ends with 1; as it does where less than half is hidden. Both iteration
times are simulated from costs that are measured before. The same two also run with gradients and new parameters through
slots (`step_slots`), cast on the host, and the step at the end with parameters cast on the device: iteration time, time
in the optimizer, and host memory of the rank that holds most, by census.
Writes benchmarks/results/step_beside_backward.json and its picture.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import pictures
from delayed_update import environment
from machine import about_this_machine
from main_job import train
from measuring import ROOT, describe, measure_command
from msgspec.structs import replace
from runtime_claims import both, length, united, without

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats import trace as traces
from megatron_ext.planner.baselines import all_cpu
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.step_slots import largest_gradient
from megatron_ext.schedule.user_defined_schedule import StepSlots

SIZES = "--num-layers 8 --hidden-size 384 --num-attention-heads 6 --seq-length 64 --micro-batch-size 1"
MODEL = [*SIZES.split(), *"--global-batch-size 8 --bf16 --untie-embeddings-and-output-weights".split()]
MODEL += "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --data-parallel-size 1".split()
MODEL += ["--optimizer-cpu-offload"]
WARM_UP = 3
SLOTS = 3


def shares(trace: Path) -> list[tuple[float, float]]:
    """Of every rank and iteration behind the warm-up, microseconds that are hidden and that are not."""
    found = defaultdict(lambda: defaultdict(list))
    for event in traces.load(trace)[0]:
        span = (event.start_us, event.start_us + event.duration_us)
        found[event.rank, event.iteration][event.lane].append(span)
    rows = []
    for (_, iteration), lanes in found.items():
        if iteration > WARM_UP and lanes["optimizer"]:
            waiting = united([*lanes["optimizer"], *lanes["wait"]])
            work = [*lanes["host_step"], *lanes["publish"]]
            hidden = sum(length(without(span, both(span, waiting))) for span in work)
            exposed = sum(length(both(span, waiting)) for span in work)
            rows.append((hidden, max(exposed, length(united(lanes["optimizer"])))))
    return rows


def in_optimizer(trace: Path) -> list[float]:
    """Of every rank and iteration behind the warm-up, microseconds in the optimizer."""
    found = defaultdict(list)
    for event in traces.load(trace)[0]:
        if event.lane == "optimizer" and event.iteration > WARM_UP:
            found[event.rank, event.iteration].append((event.start_us, event.start_us + event.duration_us))
    return [length(united(spans)) for spans in found.values()]


def host_bytes(metrics: dict) -> dict[str, int]:
    """By kind, of the rank that holds most."""
    return max((memory["host_bytes"] for memory in metrics["census"]), key=lambda kinds: sum(kinds.values()))


def variations(work, waits: schedule_file.Schedule) -> dict[str, schedule_file.Schedule]:
    """Schedules by name."""
    beside = replace(waits, rollback_bytes=1 << 30)
    size = max(largest_gradient(group, work) for group in waits.groups)
    slots = {cast: StepSlots(slots=SLOTS, slot_bytes=size, cast=cast) for cast in ("host", "device")}
    made = {"waits": waits, "beside": beside, "waits, slots": replace(waits, step_slots=slots["host"])}
    made["beside, slots"] = replace(beside, step_slots=slots["host"])
    made["waits, slots, cast on the device"] = replace(waits, step_slots=slots["device"])
    return {name: validate.validate(schedule) for name, schedule in made.items()}


def measured_costs(folder: Path, work, seconds: float) -> cost.CostTable:
    path = folder / "cost_table.json"
    command = measure_command(path, work, MODEL, hidden=384, seq=64, micro_batch_size=1, seconds=seconds)
    command.insert(command.index("--modules"), "--optimizer-on-host")
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env=environment(), stdout=sys.stderr)
    return cost.load(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--measure-seconds", type=float, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "step_beside_backward.json")
    args = parser.parse_args()
    times, steps, rows, losses, held = defaultdict(list), defaultdict(list), [], {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work = describe(folder / "workload.json", [*MODEL], 1, None)
        waits = all_cpu(work)
        table = measured_costs(folder, work, args.measure_seconds)
        schedules = variations(work, waits)
        for name, schedule in schedules.items():
            schedule_file.save(folder / f"{name}.schedule.json", schedule)
        predicted = {
            name: evaluate(work, table, schedules[name], extrapolate=True).iteration_time_us
            for name in ("waits", "beside")
        }
        for number in range(args.rounds):
            for name in list(schedules)[:: -1 if number % 2 else 1]:
                trace = folder / f"{name}.trace.json"
                more = ["--user-defined-schedule", str(folder / f"{name}.schedule.json"), "--clip-grad", "1e9"]
                more += ["--user-defined-schedule-trace", str(trace)]
                metrics = train([*MODEL, *more], folder, name, args.iters, 2)
                times[name] += metrics["iteration_us"][WARM_UP:]
                losses[name], held[name] = metrics["loss"], host_bytes(metrics)
                steps[name] += in_optimizer(trace)
                if name == "beside":
                    rows += shares(trace)
    hidden = [one / (one + other) for one, other in rows]
    result = {
        "about": about_this_machine(),
        "options": {"rounds": args.rounds, "iters": args.iters, "model": MODEL},
        "parameters": sum(p.numel for chunk in work.chunks for p in chunk.parameters),
        "iteration_us": {name: median(own) for name, own in times.items()},
        "optimizer_us": {name: median(own) for name, own in steps.items()},
        "host_bytes": held,
        "predicted_us": predicted,
        "hidden": median(hidden),
        "spread": [min(hidden), max(hidden)],
        "by_iteration": hidden,
        "losses_equal": all(own == losses["waits"] for own in losses.values()),
    }
    json_files.save(args.out, result, indent=1)
    pictures.draw(args.out)
    print({key: value for key, value in result.items() if key not in ("about", "options", "by_iteration")})
    return 0 if result["losses_equal"] and result["hidden"] >= 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
