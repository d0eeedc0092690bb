"""How much of the host's optimizer step and of publishing is hidden beside the backward, without any delay.

    .venv/bin/python benchmarks/step_beside_backward.py [--rounds 2] [--iters 10] [--states memory nvme] [--nvme DIR]

Two pipeline ranks with two chunks each train a GPT with 8 micro-batches and the optimizer on the host, every group from
its host copy. By turns the step waits for the gradient norm, and is made beside the backward (`rollback_bytes`), where
nothing is clipped. From the traces of the second kind: hidden is the time of steps and publishing in which the training
thread is neither in the optimizer nor waits for a group; the rest of these, and all other time in the optimizer, is
not hidden. Losses of all are equal, or this ends with 1; as it does where less than half is hidden. Both iteration
times are simulated from costs that are measured before. The same two also run with gradients and new parameters through
slots (`step_slots`), cast on the host, and the step at the end with parameters cast on the device: iteration time, time
in the optimizer, and host memory of the rank that holds most, by census.
`--states nvme`: the first two with all optimizer states on the drive, at least half of whose time is to be hidden.
Writes benchmarks/results/step_beside_backward.json and its picture; what was not run is kept.
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
from megatron_ext.schedule.state_placement import largest_region
from megatron_ext.schedule.step_slots import largest_gradient
from megatron_ext.schedule.user_defined_schedule import Schedule, StateSlots, StepSlots

SIZES = "--num-layers 8 --hidden-size 384 --num-attention-heads 6 --seq-length 64 --micro-batch-size 1"
MODEL = [*SIZES.split(), *"--global-batch-size 8 --bf16 --untie-embeddings-and-output-weights".split()]
MODEL += "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --data-parallel-size 1".split()
MODEL += ["--optimizer-cpu-offload"]
WARM_UP = 3
SLOTS = 3


def shares(trace: Path) -> tuple[list[float], list[float]]:
    """Of every rank and iteration behind the warm-up, which share is hidden: of the host's step and publishing, and of
    the time in which states are read or written on the drive."""
    found = defaultdict(lambda: defaultdict(list))
    for event in traces.load(trace)[0]:
        span = (event.start_us, event.start_us + event.duration_us)
        found[event.rank, event.iteration]["drive" if event.name.startswith("states ") else event.lane].append(span)
    host, drive = [], []
    for (_, iteration), lanes in found.items():
        if iteration > WARM_UP and lanes["optimizer"]:
            waiting = united([*lanes["optimizer"], *lanes["wait"]])
            hidden, exposed = _hidden([*lanes["host_step"], *lanes["publish"]], waiting)
            host.append(hidden / (hidden + max(exposed, length(united(lanes["optimizer"])))))
            hidden, exposed = _hidden(united(lanes["drive"]), waiting)
            drive += [hidden / (hidden + exposed)] if lanes["drive"] else []
    return host, drive


def _hidden(work: list[tuple[float, float]], waiting: list[tuple[float, float]]) -> tuple[float, float]:
    """Time of ``work`` outside of ``waiting``, and inside."""
    inside = [both(span, waiting) for span in work]
    return sum(length(without(span, parts)) for span, parts in zip(work, inside)), sum(map(length, inside))


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


def variations(work, waits: Schedule) -> dict[str, Schedule]:
    """Schedules by name."""
    beside = replace(waits, rollback_bytes=1 << 30)
    size = max(largest_gradient(group, work) for group in waits.groups)
    slots = {cast: StepSlots(slots=SLOTS, slot_bytes=size, cast=cast) for cast in ("host", "device")}
    made = {"waits": waits, "beside": beside, "waits, slots": replace(waits, step_slots=slots["host"])}
    made["beside, slots"] = replace(beside, step_slots=slots["host"])
    made["waits, slots, cast on the device"] = replace(waits, step_slots=slots["device"])
    return {name: validate.validate(schedule) for name, schedule in made.items()}


def on_drive(schedule: Schedule, work) -> Schedule:
    """With all optimizer states on the drive, in slots of the largest parameter's."""
    groups = tuple(replace(group, states_rest="nvme") for group in schedule.groups)
    largest = max(largest_region(schedule, work, index) for index in range(len(groups)))
    return replace(schedule, groups=groups, state_slots=StateSlots(slots=SLOTS, slot_bytes=largest))


def measured_costs(folder: Path, work, seconds: float, *more: str) -> cost.CostTable:
    path = folder / "cost_table.json"
    command = measure_command(path, work, MODEL, hidden=384, seq=64, micro_batch_size=1, seconds=seconds)
    place = command.index("--modules")
    command[place:place] = ["--optimizer-on-host", *more]
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env=environment(), stdout=sys.stderr)
    return cost.load(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="How much of the host's step is hidden beside the backward.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--measure-seconds", type=float, default=40)
    parser.add_argument("--states", nargs="+", choices=("memory", "nvme"), default=["memory", "nvme"])
    parser.add_argument("--nvme", type=Path, default=None, help="Directory on a drive; default: of temporary files.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "step_beside_backward.json")
    args = parser.parse_args()
    result = json_files.load(args.out, dict) if args.out.exists() else {}
    found = []
    for states in args.states:
        with tempfile.TemporaryDirectory(dir=args.nvme) as temporary:
            found.append(compare(args, Path(temporary), states))
        result |= found[-1] if states == "memory" else {"nvme": found[-1]}
    json_files.save(args.out, result, indent=1)
    pictures.draw(args.out)
    left_out = ("about", "options", "by_iteration")
    print([{key: value for key, value in one.items() if key not in left_out} for one in found])
    hidden = [one["drive_hidden"].get("beside", one["hidden"]) for one in found]
    return 0 if all(one["losses_equal"] for one in found) and min(hidden) >= 0.5 else 1


def compare(args, folder: Path, states: str) -> dict:
    """All kinds of run by turns, with optimizer states in memory or on the drive."""
    work = describe(folder / "workload.json", [*MODEL], 1, None)
    waits, drive = all_cpu(work), ["--nvme-path", str(folder)] if states == "nvme" else []
    table = measured_costs(folder, work, args.measure_seconds, *drive)
    schedules = variations(work, waits)
    if drive:
        waits = validate.validate(on_drive(waits, work))
        schedules = {"waits": waits, "beside": replace(waits, rollback_bytes=0)}
    for name, schedule in schedules.items():
        schedule_file.save(folder / f"{name}.schedule.json", schedule)
    predicted = {
        name: evaluate(work, table, schedules[name], extrapolate=True).iteration_time_us for name in ("waits", "beside")
    }
    times, steps, hidden, on_disk = (defaultdict(list) for _ in range(4))
    losses, held = {}, {}
    for number in range(args.rounds):
        for name in list(schedules)[:: -1 if number % 2 else 1]:
            trace = folder / f"{name}.trace.json"
            more = ["--user-defined-schedule", str(folder / f"{name}.schedule.json"), "--clip-grad", "1e9"]
            more += ["--user-defined-schedule-trace", str(trace)]
            more += ["--user-defined-schedule-nvme-path", str(folder)] if drive else []
            metrics = train([*MODEL, *more], folder, name, args.iters, 2)
            times[name] += metrics["iteration_us"][WARM_UP:]
            losses[name], held[name] = metrics["loss"], host_bytes(metrics)
            steps[name] += in_optimizer(trace)
            for kept, shown in zip((hidden, on_disk), shares(trace)):
                kept[name] += shown
    rows = hidden["beside"]
    return {
        "about": about_this_machine(),
        "options": {"rounds": args.rounds, "iters": args.iters, "model": MODEL},
        "parameters": sum(p.numel for chunk in work.chunks for p in chunk.parameters),
        "iteration_us": {name: median(own) for name, own in times.items()},
        "optimizer_us": {name: median(own) for name, own in steps.items()},
        "host_bytes": held,
        "predicted_us": predicted,
        "hidden": median(rows),
        "spread": [min(rows), max(rows)],
        "by_iteration": rows,
        "drive_hidden": {name: median(own) for name, own in on_disk.items() if own},
        "losses_equal": all(own == losses["waits"] for own in losses.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
