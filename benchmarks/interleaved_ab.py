"""Interleaved A/B: training runs share the machine in time slices of seconds, so that all of them meet the same
machine.

[Note: Time slices]
Two runs one after the other meet two machines: a processor changes its speed from minute to
minute. Here all runs are started together and all but one are stopped (SIGSTOP), a few seconds
each; what an iteration took in one slice is compared with the slice beside it. An
iteration that was stopped in its middle lasts longer than it worked, and is left out.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import NamedTuple

from megatron_ext.report.spread import WARM_UP, summarize

ROOT = Path(__file__).resolve().parents[1]


class Ended(RuntimeError):
    """A run ended with an error, or before it could be compared."""


class Run:
    """One training run. ``slices``: of every iteration, the slice in which it ended."""

    def __init__(self, name: str, command: Sequence[str], world: int, log: Path):
        self.name, self.log, self.world, self.slices, self.slice = name, log, world, [], -1
        shared = {
            "PYTHONPATH": f"{ROOT}:{ROOT / '.megatron'}",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        launcher = [sys.executable, "-m", "megatron_ext.launch.launcher", "--nproc-per-node", str(world)]
        self.process = subprocess.Popen(
            [*launcher, *command, "--log-interval", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | shared,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with open(self.log, "w") as log:
            for line in self.process.stdout:
                log.write(line)
                if "iteration" in line and "loss" in line:
                    self.slices.append(self.slice)

    def signal(self, number: int) -> None:
        """To every rank; the launcher goes on."""
        for rank in self._ranks():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank, number)

    def wait_for_ranks(self, timeout_s: float = 60) -> None:
        """Return when the launcher has started every rank, so that a signal meets all of them, or is over.

        Raises:
            Ended: it has not after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not self.over and len(self._ranks()) < self.world:
            if time.monotonic() > deadline:
                raise Ended(f"{self.name} has not started its {self.world} ranks after {timeout_s:g} s; see {self.log}")
            time.sleep(0.01)

    def _ranks(self) -> list[int]:
        """Ranks that lead their process group already."""
        try:
            children = [
                int(child)
                for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[1:]
            ]  # behind the launcher's guard
        except OSError:  # the launcher is gone
            return []
        return [child for child in children if _leads(child)]

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        if not self.over:
            self.process.terminate()
            self.process.wait()
        self._reader.join()


def _leads(process: int) -> bool:
    try:
        return os.getpgid(process) == process
    except ProcessLookupError:
        return False


def interleave(runs: Sequence[Run], slice_s: float, report: Callable[[int], None]) -> None:
    """Let ``runs`` train one after another, a slice each, until each has ended.

    Args:
        report: called with the slice's number as it begins, while all runs are stopped.

    All are ended on Ctrl-C and SIGTERM too: a stopped rank would stay for ever.

    Raises:
        Ended: a run failed; all are ended.
    """
    number, previous = 0, signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for run in runs:
            run.wait_for_ranks()  # what is started later would not be stopped, and go beside the others
        for run in runs[1:]:
            run.signal(signal.SIGSTOP)
        while not all(run.over for run in runs):
            for run in runs:
                if run.over:
                    continue
                run.slice = number
                report(number)
                run.signal(signal.SIGCONT)
                try:
                    run.process.wait(timeout=slice_s)
                except subprocess.TimeoutExpired:
                    run.signal(signal.SIGSTOP)
                number += 1
        for run in runs:
            run._reader.join()
            if run.process.returncode:
                raise Ended(f"{run.name} ended with exit code {run.process.returncode}; see {run.log}")
    finally:
        for run in runs:
            run.end()
        signal.signal(signal.SIGTERM, previous)


def whole_iterations(
    run: Run, iteration_us: Sequence[float], slice_s: float, warm_up: int = WARM_UP
) -> dict[int, list[int]]:
    """By slice, the iterations that began and ended in it, the first ``warm_up`` left out."""
    found: dict[int, list[int]] = {}
    for index, (time_slice, us) in enumerate(zip(run.slices, iteration_us, strict=True)):
        stopped = index > 0 and run.slices[index - 1] != time_slice  # began before this slice
        if index >= warm_up and not stopped and us < slice_s * 1e6:
            found.setdefault(time_slice, []).append(index)
    return found


class Figure(NamedTuple):
    """A figure of a run over its whole iterations: all values, and the median of each slice."""

    values: list[float]
    of_slice: dict[int, float]


def over_slices(
    run: Run,
    iteration_us: Sequence[float],
    figure: Sequence[float],
    slice_s: float,
    least: int = 2,
    warm_up: int = WARM_UP,
) -> Figure:
    """``figure``, one value an iteration, of the iterations that were not stopped, behind ``warm_up``; a slice
    with fewer than ``least`` of these has no median."""
    whole = whole_iterations(run, iteration_us, slice_s, warm_up)
    values = [figure[index] for indices in whole.values() for index in indices]
    return Figure(
        values,
        {
            time_slice: median(figure[i] for i in indices)
            for time_slice, indices in whole.items()
            if len(indices) >= least
        },
    )


def ratios_to(base: dict[int, float], other: dict[int, float]) -> list[float]:
    """By slice of ``other``: its median over that of ``base`` at the same time, which is the mean of
    base's slices just before and just behind it; a drift of the machine's speed falls out."""
    at_the_time = {time_slice: at_slice(base, time_slice) for time_slice in sorted(other)}
    return [other[time_slice] / value for time_slice, value in at_the_time.items() if value is not None]


def at_slice(base: dict[int, float], time_slice: int) -> float | None:
    """``base``, a figure of other slices, at the time of ``time_slice``; None where no slice lies before or none after
    it."""
    before = max((t for t in base if t < time_slice), default=None)
    behind = min((t for t in base if t > time_slice), default=None)
    if before is None or behind is None:
        return None
    share = (time_slice - before) / (behind - before)
    return base[before] * (1 - share) + base[behind] * share


class Ratio(NamedTuple):
    """Of ratios of slices: median, spread, standard error of the median, and how many there were."""

    median: float
    p10: float
    p90: float
    standard_error: float
    slices: int


def ratio_of(values: Sequence[float]) -> Ratio:
    """Summarize ratios; the median of a normal sample has 1.2533 times the standard error of its mean.

    Raises:
        Ended: fewer than two: the runs were over before they had met.
    """
    if len(values) < 2:
        raise Ended("fewer than two slices could be compared: more iterations or longer slices are needed")
    spread = summarize(values)
    return Ratio(
        spread.median_us, spread.p10_us, spread.p90_us, 1.2533 * stdev(values) / len(values) ** 0.5, len(values)
    )
