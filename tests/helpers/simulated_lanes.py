"""The tier for GPUs with a clock that is told the time, and jobs that only take it: by how long cases took on one H200
(``benchmarks/results/gpu.json``), and 30 s to start a process (case_table.py says 20 to 40)."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import lanes
from case_table import Job, Program, Training
from gpu_report import GpuReport, Result
from job_runs import Place, with_cases
from places import ROOT

START_SECONDS = 30.0
LEAST_SECONDS = 1.0
"""What took less is not what the case is: plans were made beforehand."""


def machine(**more) -> Place:
    """One H200 with 16 processors and 128 GiB, but for ``more``."""
    of_machine = dict(work=ROOT, drive=ROOT, no_drive="", dry_run=False, engine=True, processors=16, lanes=3, hang="")
    room = dict(device="a card", device_bytes=150 * 10**9, host_bytes=133 * 10**9, shared_bytes=64 << 30)
    return Place(**(of_machine | room | more))


def measured() -> Callable[[Training | Program], float]:
    """Seconds of a case: its own, or the mean of those of its size and layout, or what the table gives it."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["runs"]
    passed = [result for run in reversed(runs) for result in run["results"] if result["status"] == "pass"]
    own = {result["case"]: result["seconds"] for result in passed if result["seconds"] > LEAST_SECONDS}
    of_kind: dict[str, list[float]] = {}
    for name, seconds in own.items():
        of_kind.setdefault(name.partition(":")[0], []).append(seconds)

    def seconds(case: Training | Program) -> float:
        kind = case.name.partition(":")[0].replace("TP2 DP2", "PP2 VP2 DP2")
        alike = of_kind.get(kind) if isinstance(case, Training) else None
        return own.get(case.name) or (statistics.mean(alike) if alike else case.seconds)

    return seconds


class Went(NamedTuple):
    """``begun``: names of jobs, with the times at which they did, from the first process on; ``ended``: of cases."""

    report: GpuReport
    begun: list[tuple[float, str]]
    ended: dict[str, float]

    def left(self) -> list[str]:
        """Cases that have to be run and were not."""
        return [result.case for result in self.report.results if result.status == "NOT RUN" and not result.spare]


def report_of(todo: list[Job], **statuses: str) -> GpuReport:
    """A report in which nothing has been run, but cases with ``statuses``."""
    cases = [(case.name, job.spare) for job in todo for case in job.cases]
    results = [
        Result(case=name, status=statuses.get(name, "NOT RUN"), spare=spare, command="run") for name, spare in cases
    ]
    about = dict(created_at="", commit="", sources_sha256="", dry_run=False, machine={})
    return GpuReport(**about, budget_seconds=570.0, results=tuple(results))


def simulate(monkeypatch, todo: list[Job], place: Place, seconds, *, spent=30.0, report=None) -> Went:
    """Run ``todo``. ``seconds``: of a case, without the start of its process."""
    clock, begun, ended = [0.0], [], {}

    class Run:
        def __init__(self, job: Job, place: Place, folder: Path, begin_by: float, end: float):
            self.job, self.left, self.begin_by = job, [*job.cases], begin_by
            self.over = self.interrupted = False
            self.current, self.until = None, clock[0] + (START_SECONDS if job.layout else 0.0)
            begun.append((spent + clock[0], job.name))
            if not job.layout:
                self._begin()

        def _begin(self) -> None:
            case = self.left[0]
            self.over = clock[0] + case.seconds > self.begin_by and self.job.layout is not None
            if not self.over:
                self.current, self.until = case, clock[0] + seconds(case)

        def poll(self) -> list[Result]:
            found = []
            if clock[0] >= self.until and self.current is not None:
                ended[self.current.name] = spent + clock[0]
                found = [Result(case=self.current.name, status="pass", command="run")]
                self.left.remove(self.current)
                self.current, self.over = None, not self.left
            if clock[0] >= self.until and not self.over:
                self._begin()
            return found

        def stop(self) -> list[Result]:
            return [Result(case=self.current.name, status="NOT RUN")] if self.current else []

    def sleep(length: float) -> None:
        clock[0] += length

    monkeypatch.setattr(lanes, "time", SimpleNamespace(time=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(lanes, "JobRun", Run)
    monkeypatch.setattr(lanes, "json_files", SimpleNamespace(save=lambda path, report, indent: None))
    monkeypatch.setattr(lanes, "POLL_SECONDS", 0.5)
    done = lanes.Lanes(place, report or report_of(todo), ROOT / "report.json", spent).run(todo)
    return Went(done, begun, ended)


def job(name: str, *cases: Training | Program, **more) -> Job:
    """A job of cases, which one rank runs."""
    return with_cases(Job(name=name, cases=(), **({"layout": "1 rank"} | more)), cases)
