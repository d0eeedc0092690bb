"""Is what `fit` chooses the fastest of all settings? Simulated: small cases, every setting planned in full.

    .venv/bin/python benchmarks/fit_truth.py [--first 0] [--cases 75] [--resume]

A case draws a machine, a GPT of 2 or 3 layers, a batch and the bytes of a device that may be filled. Thousands of plans
are made, so the planner's effort is cut to a part, for `fit` and for all settings alike, and its solver left out.
Writes benchmarks/results/fit_truth.json, case by case; ``--resume`` keeps what is there. Ends with 1 where a choice is
more than 1 % slower than the best.
"""

import argparse
import contextlib
import os
import random
import sys
from pathlib import Path

import machine

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import effort, plan, policies
from megatron_ext.planner.fit.estimate_setting import quick_choice
from megatron_ext.planner.fit.request import FitProblem, Request, fit_problem_of
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.workload import Limits

OUT = Path(__file__).parent / "results" / "fit_truth.json"
WITHIN = 0.01
PART_OF_EFFORT = 40


def case(seed: int) -> tuple[Request, float]:
    """What is asked, and the part of stock's bytes that a run may fill."""
    draw = random.Random(seed)
    hidden, layers = draw.choice([1024, 2048, 4096]), draw.choice([2, 3])
    name, gpus = draw.choice([("h200-one-gpu", 1), ("l40s", 2), ("h100-nvlink", 4), ("rtx4090", 2)])
    micro, count = draw.choice([1, 2]), draw.choice([2, 3, 4])
    words = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 16 --bf16 --vocab-size 8192"
    words += f" --seq-length {draw.choice([512, 1024, 2048])} --untie-embeddings-and-output-weights"
    words += f" --micro-batch-size {micro} --global-batch-size {micro * count * gpus}"
    fixed = draw.choice([("micro-batch-size",), ("micro-batch-size", "recompute"), ("optimizer-cpu-offload",)])
    request = Request(hardware=name, world_size=gpus, words=tuple(words.split()), fixed=fixed)
    return request, draw.uniform(0.3, 0.95)


def limited(request: Request, part: float) -> FitProblem:
    problem = fit_problem_of(request)
    work = problem.space.given.workload(Limits())
    stock = max(bill.memory.device_total_bytes for bill in memory_bill(stock_schedule(work), work))
    limits = Limits(device_bytes=int(part * stock), host_bytes=problem.limits.host_bytes)
    return problem._replace(limits=limits)


def fastest_us(problem: FitProblem, setting: Setting) -> float | None:
    """The faster of the whole plan and the quick ones; None where neither keeps the limits."""
    work = setting.workload(problem.limits)
    table, found = problem.costs.of(setting, work), []
    with contextlib.suppress(InputError):
        predicted = plan(work, table).predicted
        assert predicted is not None
        found.append(predicted.iteration_time_us)
    with contextlib.suppress(InputError):
        found.append(quick_choice(setting, work, table, 0.0).us)
    return min(found, default=None)


def plan_less() -> None:
    """Cut the planner's effort."""
    effort.EFFORT.update({stage: full // PART_OF_EFFORT for stage, full in effort.EFFORT.items()})
    policies.is_tiny = lambda workload: False  # no solver


def judge(seed: int) -> dict:
    request, part = case(seed)
    problem = limited(request, part)
    begin = sum(os.times()[:4])
    try:
        found = problem.search()
    except InputError:
        found = None
    seconds = sum(os.times()[:4]) - begin
    times = {one.text(): us for one in problem.space.settings() if (us := fastest_us(problem, one)) is not None}
    row = {"seed": seed, "words": " ".join(request.words), "hardware": request.hardware, "part": part}
    row |= {"settings": len(problem.space.settings()), "that_fit": len(times), "seconds": seconds}
    if not times or found is None:
        return row | {"ratio": None, "agree": not times and found is None}
    best = min(times, key=times.__getitem__)
    ratio = found.winner.us / times[best]
    row |= {"best": best, "best_us": times[best], "chosen": found.winner.setting.text(), "chosen_us": found.winner.us}
    return row | {"ratio": ratio, "agree": ratio <= 1 + WITHIN}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=75)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = json_files.load(args.out, dict)["rows"] if args.resume and args.out.exists() else []
    plan_less()
    known = {row["seed"] for row in rows}
    for seed in range(args.first, args.first + args.cases):
        if seed in known:
            continue
        rows.append(judge(seed))
        row = rows[-1]
        print(
            f"{seed}: {row['that_fit']} of {row['settings']} fit, ratio {row['ratio']}, {row['seconds']:.1f} s",
            flush=True,
        )
        agree = sum(row["agree"] for row in rows)
        ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
        summary = {
            "cases": len(rows),
            "agree": agree,
            "compared": len(ratios),
            "worst_ratio": max(ratios, default=None),
        }
        json_files.save(args.out, {**machine.about_this_machine(), **summary, "rows": rows}, indent=1)
    return 0 if all(row["agree"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
