"""Ranks and launchers that are ended, crash or stand still at drawn points, and what the next start makes of it."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import robustness_jobs as jobs
from emulated_nodes import Nodes
from robustness_jobs import ITERATIONS, SAVE_EVERY, SETUPS, Case, Job

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGSTOP")
GBIT = 5.0
A_CASE = 5
"""Faults in runs of one drawn schedule, before the next is drawn."""

LONG_STOP_SECONDS = 60.0
PATIENCE_SECONDS = 60.0
"""A point of a run that has not come by then will not come."""


def draw_fault(draw: random.Random, number: int) -> dict:
    """Which process is sent which signal, when. Points: while ranks start, in a step, while a checkpoint is written, at
    the end."""
    point = draw.choices(("start", "iteration", "checkpoint", "end"), (3, 8, 4, 1))[0]
    name = SIGNALS[number % len(SIGNALS)]
    fault = {"signal": name, "point": point, "share": draw.random(), "rank": draw.randrange(4)}
    if draw.random() < 0.2:
        fault["rank"] = None  # the launcher
    if point == "iteration":
        fault["iteration"] = draw.randrange(1, ITERATIONS)
    elif point == "checkpoint":
        fault["iteration"] = SAVE_EVERY * draw.randint(1, ITERATIONS // SAVE_EVERY)
    if name == "SIGSTOP":
        fault["seconds"] = LONG_STOP_SECONDS if draw.random() < 0.08 else round(0.2 + 2 * draw.random(), 1)
    return fault


def wait_for(job: Job, case: Case, fault: dict) -> bool:
    """Wait for the point of a fault; False where the run ended before."""
    deadline, saved = time.monotonic() + PATIENCE_SECONDS, job.folder / "checkpoints"

    def reached() -> bool:
        if fault["point"] == "start":
            return job.seconds() > fault["share"] * case.first_s
        if fault["point"] == "checkpoint":
            return any((saved / f"iter_{fault['iteration']:07d}").glob("*"))
        return job.iteration() >= (fault.get("iteration") or ITERATIONS)

    while not reached():
        if not job.running() or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    more = {"iteration": case.iteration_s, "checkpoint": 0.05, "end": 0.3}.get(fault["point"], 0.0)
    time.sleep(fault["share"] * more)
    return job.running()


def send(job: Job, fault: dict) -> int | None:
    """The process that was sent the signal; None where it had ended or not begun."""
    ranks = job.ranks()
    if fault["rank"] is not None and len(ranks) < 4:
        return None
    victim = job.pid if fault["rank"] is None else ranks[fault["rank"]]
    try:
        os.kill(victim, getattr(signal, fault["signal"]))
        if "seconds" in fault:
            time.sleep(fault["seconds"])
            os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:
        return None
    return victim


def one_fault(case: Case, fault: dict, folder: Path) -> dict | None:
    """What became of a run with a fault, and of the next start; None where the fault met no process."""
    job = jobs.start(case, folder)
    victim = send(job, fault) if wait_for(job, case, fault) else None
    hangs = not job.wait()
    said, code = job.said(), job.code
    left = job.leftovers()
    half = [text for text in left if re.match(r"file checkpoints/[^/]+\.tmp(/|$)", text)]
    found = {**fault, "setup": case.setup, "code": code, "hangs": hangs, "half_written": half}
    found["leftovers"] = [text for text in left if text not in half]
    if victim is None:
        return None if code == 0 and not hangs else found | {"met": False, "said": said[-3000:]}
    if fault["rank"] is not None and code:
        named = re.search(r"launch: rank (\d+) \(process (\d+)\)", said)
        found |= {"named": named is not None and int(named[2]) == victim}
    wrong = hangs or found["leftovers"] or found.get("named") is False
    if code == 0:
        found["differences"] = jobs.differences(case.reference, jobs.result(job))
    elif fault["signal"] == "SIGSTOP":
        wrong = True  # who only stood still goes on
    found["resumed"] = jobs.resumed(case, job)
    if wrong or found["resumed"]["code"] or found["resumed"]["differences"]:
        found["said"] = said[-3000:]
    return found


def kills(count: int, seed: int, folder: Path, corpus: Path, save: Callable[[list], None], known: list) -> list[dict]:
    """``count`` faults that met a process; goes on behind the ``known`` ones, and hands all to ``save`` after each."""
    results, number = list(known), len(known)
    while len(results) < count:
        setup = list(SETUPS)[number // A_CASE % len(SETUPS)]
        with nodes_or_none(jobs.nodes_of(setup)) as nodes:
            shutil.rmtree(folder, ignore_errors=True)
            case = jobs.drawn(setup, seed * 1000 + number, folder / "case", corpus, nodes)
            for _ in range(A_CASE):
                if len(results) == count:
                    break
                draw = random.Random(f"{seed} {number}")
                found, number = one_fault(case, draw_fault(draw, number), folder / "run"), number + 1
                shutil.rmtree(folder / "run")
                if found is not None:
                    results.append(found | {"routes": case.routes, "seed": seed})
                    save(results)
    return results


def nodes_or_none(count: int):
    """Emulated nodes, or nothing where there is one."""
    return Nodes(count, GBIT) if count > 1 else contextlib.nullcontext()


NONE_OF = (
    "hangs",
    "leftovers",
    "leftovers of the next start",
    "failed without a fault",
    "next start failed",
    "next start differs",
    "runs that went on and differ",
    "stood still and failed",
)
"""Figures of a summary that should be 0."""


def by_point(results: list[dict]) -> list[dict]:
    """How many faults, and how many of them went wrong in any way, by signal, point and victim."""
    rows: dict[tuple, list[dict]] = {}
    for found in results:
        victim = "launcher" if found["rank"] is None else "rank"
        rows.setdefault((found["signal"], found["point"], victim), []).append(found)
    return [
        {"signal": signal, "point": point, "victim": victim, "faults": len(found), "wrong": sum(map(went_wrong, found))}
        for (signal, point, victim), found in sorted(rows.items())
    ]


def went_wrong(found: dict) -> bool:
    figures = summary([found])
    return any(figures[name] for name in NONE_OF) or figures["rank named"] < figures["rank to be named"]


def summary(results: list[dict]) -> dict:
    """The figures of faults: hangs, tracebacks of the next start, leftovers, equality, and how often the right rank is
    named."""
    named = [found["named"] for found in results if "named" in found]
    again = [found["resumed"] for found in results if "resumed" in found]
    return {
        "faults": len(results),
        "seeds": sorted({found["seed"] for found in results if "seed" in found}),
        "faults by what the schedule uses": Counter(used for found in results for used in found.get("routes", ())),
        "hangs": sum(found["hangs"] for found in results) + sum(one["hangs"] for one in again),
        "left half a checkpoint": sum(bool(found["half_written"]) for found in results),
        "leftovers": sum(bool(found["leftovers"]) for found in results),
        "leftovers of the next start": sum(bool(one["leftovers"]) for one in again),
        "failed without a fault": sum(found.get("met") is False for found in results),
        "next start failed": sum(one["code"] != 0 for one in again),
        "next start differs": sum(bool(one["differences"]) for one in again),
        "runs that went on and differ": sum(bool(found.get("differences")) for found in results),
        "stood still and failed": sum(
            found["signal"] == "SIGSTOP" and found["code"] != 0 and found.get("met", True) for found in results
        ),
        "rank to be named": len(named),
        "rank named": sum(named),
    }
