"""The content of the timeline: the iterations and runs that it shows, their ranks, and the bars in each row."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megatron_ext.formats.trace import LANES, WAITS, Event
from megatron_ext.report.build_report import Report
from megatron_ext.report.measured_trace import THREAD_LANES
from megatron_ext.report.spread import summarize
from megatron_ext.workload.parallel import Parallel

GATHERS = ("gpu", "cpu", "nvme", "publish")
"""Lanes that bring parameters."""

ZOOM_BELOW = 0.25
"""If all gathers of the schedule lie in a smaller share of the iteration than this, that share is shown enlarged."""


MOST_RANKS = 8
"""The most ranks in one panel. If there are more, evenly spaced pipeline ranks are shown."""


class TimelineRow(NamedTuple):
    """Bars of the training thread of a rank (``lane`` is ``thread``) or of one of its links. A step is one bar."""

    rank: int
    lane: str
    bars: list[Event]

    def total_us(self, lane: str) -> float:
        """The sum of all bars of a lane in microseconds."""
        return sum(bar.duration_us for bar in self.bars if bar.lane == lane)


def shown_ranks(parallel: Parallel, *, replicas: bool) -> list[int]:
    """The global ranks to show: all ranks if they are few (and ``replicas``), else one of each pipeline
    rank, else evenly spaced pipeline ranks including the first and the last."""
    if replicas and parallel.world_size <= MOST_RANKS // 2:
        return list(range(parallel.world_size))
    chosen = sorted({round(n * (parallel.pp - 1) / (MOST_RANKS - 1)) for n in range(MOST_RANKS)})
    return [parallel.global_rank(pp_rank, 0) for pp_rank in chosen]


def rows(events: Iterable[Event], ranks: list[int]) -> list[TimelineRow]:
    """Rows from top to bottom: for each rank its training thread, then the links that it used."""
    by_place: dict[tuple[int, str], list[Event]] = defaultdict(list)
    wanted = set(ranks)
    for event in events:
        if event.rank in wanted:
            by_place[event.rank, event.lane].append(event)
    found = []
    for rank in ranks:
        thread = _steps(by_place[rank, "compute"])
        # Later bars are drawn on top, so that the waits of a step are visible within the step.
        for lane in ("optimizer", "issue", *WAITS):
            thread += by_place[rank, lane]
        found.append(TimelineRow(rank, "thread", thread))
        for lane in LANES:
            if lane not in THREAD_LANES and by_place[rank, lane]:
                found.append(TimelineRow(rank, lane, by_place[rank, lane]))
    return found


def _steps(events: list[Event]) -> list[Event]:
    """Join the events to one bar per step: the simulator records the parts of a step between two waits."""
    steps: dict[str, Event] = {}
    for event in events:
        begun = steps.get(event.name, event)
        start, end = min(begun.start_us, event.start_us), max(begun.end_us, event.end_us)
        steps[event.name] = event._replace(start_us=start, duration_us=end - start)
    return [*steps.values()]


class Panel(NamedTuple):
    """One iteration as drawn. ``step``: (begin, end) of its iteration time, in microseconds after
    the first rank had fresh parameters."""

    title: str
    rows: list[TimelineRow]
    step: tuple[float, float]

    def end_us(self, lanes: tuple[str, ...] | None = None) -> float:
        """The end of the last bar of ``lanes``, or of all lanes."""
        ends = [bar.end_us for row in self.rows for bar in row.bars if lanes is None or row.lane in lanes]
        return max(ends, default=0.0)

    def first_gather_us(self) -> float:
        """The start of the first gather or publishing; 0 if there is none."""
        return min((bar.start_us for row in self.rows if row.lane in GATHERS for bar in row.bars), default=0.0)


def panels(report: Report) -> list[Panel]:
    """The panels from top to bottom: the scheduled iteration simulated, the same measured, and the compared run, if it
    was measured."""
    run = report.run
    parallel = run.workload.parallel
    simulated = Panel(
        "by the schedule, SIMULATED",
        rows(report.simulated, shown_ranks(parallel, replicas=False)),
        (0.0, report.predicted_iteration_time_us.scheduled),
    )
    found, other = [simulated], "stock Megatron" if run.stock_name == "stock" else run.stock_name
    for name, replicas, took, trace in (
        ("by the schedule", True, run.iteration_us, run.scheduled_trace),
        (other, False, run.stock and run.stock.iteration_us, run.stock_trace),
    ):
        if took is not None and trace is not None:
            # The iteration of median length among those that follow neither an evaluation nor a turn of the other run.
            usable = [index for index in run.counted if not trace.evaluated_before(index + 1)] or run.counted
            middle_us = summarize([took[index] for index in usable]).median_us
            window = trace.window(1 + min((abs(took[index] - middle_us), index) for index in usable)[1])
            title = f"{name}, MEASURED: iteration {window.iteration} of {run.iterations}, nearest to the median"
            shown = rows(window.events, shown_ranks(parallel, replicas=replicas))
            begin = max(window.end_us - took[window.iteration - 1], 0.0)
            found.append(Panel(title, shown, (begin, window.end_us)))
    return found


def zoom_us(drawn: list[Panel]) -> float | None:
    """Microseconds from the first to the last of the schedule's gathers, simulated and measured. None if that is such a
    large part of the iteration that a larger view would show nothing new."""
    scheduled = drawn[:2]
    longest = max(panel.end_us(GATHERS) - panel.first_gather_us() for panel in scheduled)
    whole = max(panel.end_us() for panel in drawn)
    return 1.15 * longest if 0 < longest < ZOOM_BELOW * whole else None
