"""Runs jobs in the order of their importance, several at once where they may share the device, within a budget."""

import itertools
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from case_table import Job, Program, Training
from gpu_report import FINAL, GpuReport, Result
from job_runs import JobRun, Place, untried, with_cases
from msgspec.structs import replace

from megatron_ext.formats import json_files

POLL_SECONDS = 0.1


def has_room(place: Place, running: list[JobRun], cases: list[Training | Program]) -> bool:
    """Whether the device has room for ``cases`` beside what runs."""
    held, need = sum(one.device_bytes for one in running), max(case.device_bytes for case in cases)
    return not held or place.device_bytes is None or held + need <= place.device_bytes


class Lanes:
    """The jobs that run, and the report that is written as they go on.

    Args:
        out: where the report is written.
        spent: seconds of the budget that are gone already.
    """

    def __init__(self, place: Place, report: GpuReport, out: Path, spent: float):
        self.place, self.report, self.out = place, report, out
        self._start = time.time() - spent
        self._end = self._start + report.budget_seconds
        self._running: list[JobRun] = []
        self._waiting: deque[Job] = deque()
        self._left: list[Job] = []
        self._folders = (place.work / f"job{number}" for number in itertools.count())

    def run(self, todo: list[Job]) -> GpuReport:
        """Run what has no result yet: until ``until`` of each job, and what that leaves until the end."""
        self._keep(*(result for job in todo for case in job.cases if (result := untried(case, self.place))))
        for at_the_end in (False, True):
            source = self._left if at_the_end else todo
            self._waiting.extend(replace(job, until=1.0) if at_the_end else job for job in source)
            self._left = []
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

    def close(self) -> None:
        """End every process, whatever has happened."""
        for running in self._running:
            running.stop()

    def _start_what_may(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            cases = [case for case in job.cases if not self._has_result(case.name)]
            deadline = self._start + job.until * (self._end - self._start)
            if not cases or time.time() + cases[0].seconds > deadline:
                self._left += [with_cases(job, cases)] if cases else []
                self._waiting.popleft()
                continue
            alone = job.alone or any(running.job.alone for running in self._running)
            most = 1 if alone else self.place.lanes
            if len(self._running) >= most or not has_room(self.place, self._running, cases):
                return
            self._waiting.popleft()
            self._running.append(JobRun(with_cases(job, cases), self.place, next(self._folders), deadline, self._end))
            print(f"{time.time() - self._start:6.0f} s  begins: {job.name}", flush=True)

    def _poll(self) -> None:
        for running in [*self._running]:
            self._keep(*running.poll())
            if running.over:
                self._running.remove(running)
                if running.left and running.interrupted:
                    self._waiting.appendleft(with_cases(running.job, running.left))
                elif running.left:
                    self._left.append(with_cases(running.job, running.left))

    def _has_result(self, name: str) -> bool:
        result = self.report.of(name)
        return result is not None and result.status in FINAL

    def _keep(self, *results: Result) -> None:
        """Write results to the report, and say them."""
        for result in results:
            earlier = self.report.of(result.case)
            self.report = self.report.with_result(replace(result, spare=earlier is not None and earlier.spare))
            print(f"{time.time() - self._start:6.0f} s  {result.status:<13} {result.case}", flush=True)
        self.report = replace(self.report, spent_seconds=round(time.time() - self._start, 1))
        if results or not self._running:
            json_files.save(self.out, self.report, indent=1)
