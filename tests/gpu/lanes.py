"""Runs jobs in the order of their importance, several at once where they may share the machine, within a budget."""

import itertools
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from case_table import PLANNED, Job, Program, Training
from gpu_report import FINAL, OF_MEMORY, GpuReport, Result
from job_runs import JobRun, Place, with_cases
from msgspec.structs import replace
from untried import untried

from megatron_ext.formats import json_files

POLL_SECONDS = 0.1

SHARED = ("device_bytes", "host_bytes", "shared_bytes")
"""What jobs that run at once take parts of; names of attributes of cases and of a :class:`Place`."""


def has_room(place: Place, running: list[JobRun], cases: list[Training | Program]) -> bool:
    """Whether device and host have memory for ``cases`` beside what runs. A case that is left is counted as running:
    what comes after it in its job has its room already."""
    for what in SHARED:
        there, held = getattr(place, what), sum(_most(one.left, what) for one in running)
        if there is not None and held and held + _most(cases, what) > there:
            return False
    return True


def _most(cases: Iterable[Training | Program], what: str) -> int:
    return max((getattr(case, what) for case in cases), default=0)


class Lanes:
    """The jobs that run, and the report that is written as they go on.

    Args:
        out: where the report is written.
        spent: seconds of the budget that are gone already.
    """

    def __init__(self, place: Place, report: GpuReport, out: Path, spent: float):
        self.place, self.report, self.out = place, report, out
        self._begun = time.time()
        self._start = self._begun - spent
        self._end = self._start + report.budget_seconds
        self._running: list[JobRun] = []
        self._waiting: list[Job] = []
        self._folders = (place.work / f"job{number}" for number in itertools.count())

    def run(self, todo: list[Job]) -> GpuReport:
        """Run what has no result yet: jobs that have to be run until ``until`` of each, then what they left, until the
        end; then spare ones in the same way."""
        self._keep(*self._looked_at([case for job in todo for case in job.cases]))
        self._keep(*self._plans_again())
        self._waiting = sorted(todo, key=lambda job: job.spare)
        while (self._waiting or self._running) and time.time() < self._end:
            self._start_what_may()
            self._poll()
            time.sleep(POLL_SECONDS)
        with ThreadPoolExecutor() as pool:  # page-locked memory takes its time to be given back
            for results in pool.map(JobRun.stop, self._running):
                self._keep(*results)
        self._running = []
        self._keep()
        return self.report

    def _looked_at(self, cases: list[Training | Program]) -> list[Result]:
        """Those that cannot be tried; and, of a run that goes on, those that could not and now can."""
        found = []
        for case in cases:
            earlier = self.report.of(case.name)
            if earlier is None or _looked_at_again(earlier):
                result = untried(case, self.place) or Result(case=case.name, status="NOT RUN")
                found += [] if earlier is not None and earlier.status == result.status == "NOT RUN" else [result]
        return found

    def _plans_again(self) -> list[Result]:
        """Plans are files of one run: one that goes on makes them again, if a row without a result needs them."""
        needed = dict.fromkeys(
            plans for row, plans in PLANNED.items() if self.report.of(row) and not self._has_result(row)
        )
        return [Result(case=plans, status="NOT RUN") for plans in needed if self._has_result(plans)]

    def close(self) -> None:
        """End every process, whatever has happened."""
        for running in self._running:
            running.stop()

    def _start_what_may(self) -> None:
        """Start jobs until all lanes are taken. What there is no room for waits, and what comes behind it may go first,
        but not before a job that runs alone: it would never begin."""
        at = 0
        while at < len(self._waiting):
            job = self._waiting[at]
            wanted = [case for case in job.cases if not self._has_result(case.name)]
            alone = job.alone or any(running.job.alone for running in self._running)
            if wanted and len(self._running) >= (1 if alone else self.place.lanes):
                return
            cases = [case for case in wanted if self._has_plan(case.name)]
            deadline = self._begun + job.until * (self._end - self._begun)
            if not cases or time.time() + cases[0].seconds > deadline:
                self._waiting.remove(job)
                self._put_off(job, cases)
            elif not has_room(self.place, self._running, cases):
                at += 1
            else:
                self._waiting.remove(job)
                self._begin(with_cases(job, cases), deadline)

    def _begin(self, job: Job, deadline: float) -> None:
        self._running.append(JobRun(job, self.place, next(self._folders), deadline, self._end))
        print(f"{time.time() - self._start:6.0f} s  begins: {job.name}", flush=True)

    def _put_off(self, job: Job, cases: list[Training | Program]) -> None:
        """What a job left is tried once more, behind all that is as important; then there is no time for it."""
        if cases and job.until < 1:
            place = next((at for at, one in enumerate(self._waiting) if one.spare > job.spare), len(self._waiting))
            self._waiting.insert(place, replace(with_cases(job, cases), until=1.0))

    def _poll(self) -> None:
        for running in [*self._running]:
            self._keep(*running.poll())
            if running.over:
                self._running.remove(running)
                if running.left and running.interrupted:
                    self._waiting.insert(0, with_cases(running.job, running.left))
                else:
                    self._put_off(running.job, running.left)

    def _has_result(self, name: str) -> bool:
        result = self.report.of(name)
        return result is not None and result.status in FINAL

    def _has_plan(self, name: str) -> bool:
        """Whether a case is not one that needs plans which were not tried to be made."""
        return name not in PLANNED or self._has_result(PLANNED[name])

    def _keep(self, *results: Result) -> None:
        """Write results to the report, and say them."""
        for result in results:
            earlier = self.report.of(result.case)
            self.report = self.report.with_result(replace(result, spare=earlier is not None and earlier.spare))
            print(f"{time.time() - self._start:6.0f} s  {result.status:<13} {result.case}", flush=True)
        self.report = replace(self.report, spent_seconds=round(time.time() - self._start, 1))
        if results or not self._running:
            json_files.save(self.out, self.report, indent=1)


def _looked_at_again(earlier: Result) -> bool:
    """Whether a run that goes on tries this case: also what could not be tried, but for plans that no limit allows."""
    if earlier.status == "could not try" and not any(words in earlier.said for words in OF_MEMORY):
        return True
    return earlier.status not in FINAL or not earlier.command
