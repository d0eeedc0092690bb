"""What a run prints on its first rank: at the start what it does, at the end what it measured.

[Note: A sample]
Gathers are timed only in the iterations of :data:`SAMPLED`. These come after the first, which also warms up, and are
few, so a long training stores little. With a trace everything is recorded, and the same iterations are summarized.
"""

import sys
import time
from collections import defaultdict
from statistics import median
from typing import NamedTuple

from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule import memory_bill
from megatron_ext.schedule.footprint import device_peaks, pinned_host_bytes
from megatron_ext.schedule.schedule_text import bytes_by_route
from megatron_ext.schedule.user_defined_schedule import Schedule

SAMPLED = range(2, 12)
"""Iterations, counted from 1 in this run."""

LAYOUT_NOTE = (
    "a run without a schedule differs from it in the last bits: the gradient norm is added up bucket by bucket, and "
    "other buckets are another order of additions"
)


class RunTimes(NamedTuple):
    """Medians over the sampled iterations of the largest values over ranks, in microseconds.

    Attributes:
        iterations: the number of sampled iterations.
        iteration_us: the time from the beginning of an iteration to the beginning of the next.
        exposed_us: the time for which compute waits for parameters.
        gather_us: the training thread's time in gathers: issuing, publishing, waiting.
    """

    iterations: int
    iteration_us: float
    exposed_us: float
    gather_us: float


class Sample:
    """Times of this rank in the sampled iterations."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self._began_us: dict[int, float] = {}
        self._numbers: dict[int, int] = {}  # of micro-batches
        self._run_again: set[int] = set()

    def begin_iteration(self, iteration: int, num_microbatches: int) -> None:
        if iteration <= SAMPLED.stop:
            self._began_us[iteration] = time.perf_counter() * 1e6
            self._numbers[iteration] = num_microbatches

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of the last sampled iteration; only iterations with this number count."""
        return next(reversed(self._numbers.values()), 0)

    def run_again(self, iteration: int) -> None:
        """Leave out ``iteration``, whose steps run again (Megatron's rerun machinery), so its times are not normal."""
        self._run_again.add(iteration)

    def of_rank(self) -> dict[int, tuple[float, float, float]]:
        """By iteration: its time, exposed time and gather time in microseconds. An iteration that has not ended is left
        out."""
        lanes: dict[tuple[int, str], float] = defaultdict(float)
        for event in self.recorder.events():
            lanes[event.iteration, event.lane] += event.duration_us
        return {
            i: (self._began_us[i + 1] - self._began_us[i], lanes[i, "wait"], lanes[i, "wait"] + lanes[i, "issue"])
            for i in SAMPLED
            if {i, i + 1} <= self._began_us.keys() and i not in self._run_again
            if self._numbers[i] == self.num_microbatches
        }


def combine_ranks(everybody: list[dict[int, tuple[float, float, float]]]) -> RunTimes | None:
    """Combine the measurements of all ranks; None if no iteration was sampled."""
    common = set.intersection(*(set(rank) for rank in everybody))
    if not common:
        return None
    largest = [[max(rank[i][figure] for rank in everybody) for i in sorted(common)] for figure in range(3)]
    return RunTimes(len(common), *(median(values) for values in largest))


def say(*lines: str) -> None:
    """Print lines for the user."""
    for line in lines:
        print(f"megatron-ext: {line}", file=sys.stderr, flush=True)


def start_lines(schedule: Schedule, path, trace_path, *, reference: bool) -> list[str]:
    """Lines that say what a scheduled run is about to do."""
    how = "Megatron's own gather at the bucket layout of" if reference else "gathers by"
    lines = [
        f"{how} {path} (policy {schedule.metadata.planner or 'not named'}, zero stage {schedule.zero_stage}, "
        f"{len(schedule.groups)} groups)"
    ]
    if not reference:
        lines.append(f"brought in one iteration, all ranks of a pipeline: {bytes_by_route(schedule)}")
        if schedule.publish:
            need, limit = max(pinned_host_bytes(schedule)), schedule.limits.pinned_host_bytes
            allowed = "no limit" if limit is None else f"limit {limit / 2**20:.1f} MiB"
            lines.append(f"host copies and staging slots take up to {need / 2**20:.1f} MiB per node ({allowed})")
        if schedule.zero_stage == 3:
            lines.append(_whole_at_times(schedule))
        lines.append(f"predicted: {_predicted(schedule)}")
    lines.append(
        f"trace: {trace_path}" if trace_path else "trace: none (--user-defined-schedule-trace FILE writes one)"
    )
    return lines


def _whole_at_times(schedule: Schedule) -> str:
    """What evaluation and checkpoints need in addition to training."""
    ranks = range(len(schedule.ranks))
    whole = max(sum(group.bytes for group in schedule.groups if group.pp_rank == rank) for rank in ranks)
    readers = "evaluation, checkpoints and the end of training bring all of them"
    if memory_bill.never_whole(schedule):
        readers = "evaluation and checkpoints bring them group by group, of all"
    return (
        f"whole parameters on a rank: up to {max(device_peaks(schedule)) / 2**20:.1f} MiB in training; {readers}, "
        f"up to {whole / 2**20:.1f} MiB"
    )


def _predicted(schedule: Schedule) -> str:
    found = schedule.predicted
    if found is None:
        return "nothing, because the schedule has no prediction"
    return _figures(found.iteration_time_us, max(found.exposed_us, default=0.0), found.gather_us)


def end_lines(
    schedule: Schedule, measured: RunTimes | None, compared: RunTimes | None, *, reference: bool
) -> list[str]:
    """Lines with the measurements and the prediction; ``compared`` is the reference run's, if there was one."""
    if measured is None:
        return [f"nothing measured: fewer than {SAMPLED.start + 1} iterations were trained, or all were run again"]
    whose = "Megatron's own gather" if reference else "the schedule"
    lines = [f"measured with {whose}, median of {measured.iterations} iterations: {_figures(*measured[1:])}"]
    if reference:
        return lines
    lines.append(f"predicted: {_predicted(schedule)}")
    if compared is None:
        lines.append(
            "not measured: the time with Megatron's own gather (--user-defined-schedule-check FILE measures it)"
        )
        return lines
    exposed_us = compared.exposed_us - measured.exposed_us
    iteration_us = compared.iteration_us - measured.iteration_us
    lines += [
        f"Megatron's own gather at this layout: {_figures(*compared[1:])}",
        f"gained in an iteration: {exposed_us / 1e3:.3f} ms of exposed time, {iteration_us / 1e3:.3f} ms in all, which "
        "includes what else the machine did in the two runs",
    ]
    return lines


def early_lines(taken: int, taken_back: int) -> list[str]:
    """A line that says how many steps during the backward, on all ranks, were taken back; no line if none was."""
    if not taken_back:
        return []
    return [
        f"steps during the backward: {taken_back} of {taken} were taken back and made again at the end, because "
        "gradients were clipped or a step was skipped. Each time the next 1 to 16 iterations made no such steps. The "
        "prediction assumes that none is taken back; a schedule without rollback_bytes makes no such steps"
    ]


def _figures(iteration_us: float, exposed_us: float, gather_us: float | None) -> str:
    gather = "" if gather_us is None else f", gather time {gather_us / 1e3:.3f} ms"
    return f"iteration {iteration_us / 1e3:.3f} ms, exposed {exposed_us / 1e3:.3f} ms{gather}"
