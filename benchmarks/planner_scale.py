"""How planning, simulating and loading grow with the pipeline; the 175B case of PP 16, VP 8; large models in little
memory.

    python benchmarks/planner_scale.py [--largest 64] [--runs 3]

Processor seconds of one core, smallest of the runs, with their spread: another program on the
machine cannot shorten them. Writes benchmarks/results/planner_scale.json and planner_scale.png.
Ends 0 if the large case meets its limits, plans in little memory are at most 5 % above the lower
bound, and the growth of simulating is close to linear in the number of steps and gathers.
"""

import argparse
import math
import os
import resource
import sys
import time
from pathlib import Path

from machine import about_this_machine
from planning_cases_large import MACHINES, SHAPES, TRILLION, make_table, make_workload, with_drive, with_little_memory

from megatron_ext.formats import json_files
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate

RESULT = Path(__file__).parent / "results" / "planner_scale.json"
LIMITS = {
    "plan_zero_3": 60.0,
    "plan_zero_1": 5.0,
    "simulate": 20.0,
    "load_and_validate": 1.0,
    "schedule_bytes": 5e6,
    "peak_gib": 4.0,
    "over_bound": 0.05,
}
MACHINE = next(machine for machine in MACHINES if machine.name == "2x8xH100-slow")


def timed(runs: int, action) -> tuple[dict, object]:
    """Processor seconds of ``action`` (smallest and largest of ``runs``) and its last result."""
    seconds = []
    for _ in range(runs):
        started = time.process_time()
        result = action()
        seconds.append(time.process_time() - started)
    return {"seconds": round(min(seconds), 4), "largest_seconds": round(max(seconds), 4), "runs": runs}, result


def measure(work, runs: int, table=None) -> dict:
    table = table or make_table(MACHINE, work)
    planning, planned = timed(1, lambda: plan(work, table))
    path = RESULT.parent / ".planner_scale.schedule.json"
    schedule_file.save(path, planned)
    size = path.stat().st_size
    loading, _ = timed(runs, lambda: validate.load(path))
    path.unlink()
    simulating, result = timed(runs, lambda: evaluate(work, table, planned, bound_us=0.0))
    parallel = work.parallel
    return {
        "pp": parallel.pp,
        "vp": parallel.vp,
        "microbatches": parallel.num_microbatches,
        "zero_stage": work.zero_stage,
        "steps": 2 * parallel.pp * parallel.vp * parallel.num_microbatches,
        "groups": len(planned.groups),
        "gathers": sum(len(e.unshard) for r in planned.ranks for e in (r.start, *r.steps)),
        "plan": planning,
        "simulate": simulating,
        "load_and_validate": loading,
        "schedule_bytes": size,
        "iteration_time_us": result.iteration_time_us,
        "lower_bound_us": planned.predicted.lower_bound_us,
        "over_bound": result.iteration_time_us / planned.predicted.lower_bound_us - 1,
    }


def in_little_memory(runs: int) -> dict[str, dict]:
    """1T parameters with memory for 40 % of a rank's parameters, 175B with 20 % and a drive."""
    trillion = with_little_memory(make_workload(TRILLION, zero_stage=3, microbatches=256), 0.4)
    gpt3 = with_little_memory(make_workload(SHAPES[0], zero_stage=3, microbatches=128), 0.2, nvme_slots=2)
    table = with_drive(make_table(MACHINE, gpt3))
    return {
        "1T, 40 % of the memory": measure(trillion, runs),
        "175B, 20 % of the memory, a drive": measure(gpt3, runs, table),
    }


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    work = [row["steps"] + row["gathers"] for row in rows]
    for name in ("plan", "simulate", "load_and_validate"):
        axes.loglog(work, [row[name]["seconds"] for row in rows], marker="o", label=name.replace("_", " "))
    first = rows[0]["simulate"]["seconds"] / work[0]
    axes.loglog(work, [first * w for w in work], linestyle=":", color="grey", label="linear")
    for row, at in zip(rows, work):
        axes.annotate(f"PP {row['pp']}", (at, row["plan"]["seconds"]), fontsize=7)
    axes.set_xlabel("steps + gathers of one iteration")
    axes.set_ylabel("processor seconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    load, shape = os.getloadavg()[0], SHAPES[0]
    large = [
        measure(make_workload(shape._replace(layers=128), zero_stage=zero, microbatches=128, pp=16, vp=8), options.runs)
        for zero in (3, 1)
    ]
    print(*large, sep="\n", flush=True)
    tight = in_little_memory(options.runs)
    print(tight, flush=True)
    rows = []
    pp = 2
    while pp <= options.largest:
        rows.append(
            measure(
                make_workload(shape._replace(layers=2 * pp), zero_stage=3, microbatches=64, pp=pp, vp=2), options.runs
            )
        )
        print(rows[-1], flush=True)
        pp *= 2
    ends = [(row["steps"] + row["gathers"], row["simulate"]["seconds"]) for row in (rows[0], rows[-1])]
    exponent = math.log(ends[1][1] / ends[0][1]) / math.log(ends[1][0] / ends[0][0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    met = {
        "plan_zero_3": large[0]["plan"]["seconds"] <= LIMITS["plan_zero_3"],
        "plan_zero_1": large[1]["plan"]["seconds"] <= LIMITS["plan_zero_1"],
        "simulate": large[0]["simulate"]["seconds"] <= LIMITS["simulate"],
        "load_and_validate": large[0]["load_and_validate"]["seconds"] <= LIMITS["load_and_validate"],
        "schedule_bytes": large[0]["schedule_bytes"] <= LIMITS["schedule_bytes"],
        "peak_gib": peak <= LIMITS["peak_gib"],
        "over_bound": all(row["over_bound"] <= LIMITS["over_bound"] for row in tight.values()),
        "growth": exponent <= 1.25,
    }
    about = about_this_machine(load_before=load)
    json_files.save(
        RESULT,
        {
            **about,
            "asked": LIMITS,
            "met": met,
            "growth_exponent": exponent,
            "peak_gib": peak,
            "large": large,
            "in_little_memory": tight,
            "rows": rows,
        },
        indent=1,
    )
    plot(rows, RESULT.with_suffix(".png"))
    print(f"growth of simulating: steps + gathers to the power {exponent:.2f}; peak memory {peak:.2f} GiB; met: {met}")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
