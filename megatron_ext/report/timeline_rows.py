"""What one picture of an iteration shows: which ranks, in which rows, with which bars."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megatron_ext.formats.trace import END_NOT_KNOWN, LANES, WAITS, Event
from megatron_ext.report.measured_trace import THREAD_LANES
from megatron_ext.workload.parallel import Parallel

MOST_RANKS = 8
"""Ranks in one panel; of more, an even choice of pipeline ranks is shown."""


class Bar(NamedTuple):
    """An interval in a row; ``kind`` is what it is drawn as: a lane, or F or B for a step."""

    kind: str
    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        """When it ends."""
        return self.start_us + self.duration_us

    @property
    def end_known(self) -> bool:
        """Whether the bar ends where the transfer did, and not where something had waited for it."""
        return self.name != END_NOT_KNOWN


class Row(NamedTuple):
    """Bars of the training thread of a rank (``lane`` is ``thread``) or of one of its links."""

    rank: int
    lane: str
    bars: list[Bar]

    def total_us(self, kind: str) -> float:
        """Microseconds of all bars of a kind."""
        return sum(bar.duration_us for bar in self.bars if bar.kind == kind)


def shown_ranks(parallel: Parallel, *, replicas: bool) -> list[int]:
    """Global ranks to show: all if they are few (and ``replicas``), else one of each pipeline
    rank, else an even choice of those that keeps the first and the last."""
    if replicas and parallel.world_size <= MOST_RANKS // 2:
        return list(range(parallel.world_size))
    if parallel.pp <= MOST_RANKS:
        return [parallel.global_rank(pp_rank, 0) for pp_rank in range(parallel.pp)]
    chosen = sorted({round(n * (parallel.pp - 1) / (MOST_RANKS - 1)) for n in range(MOST_RANKS)})
    return [parallel.global_rank(pp_rank, 0) for pp_rank in chosen]


def rows(events: Iterable[Event], ranks: list[int]) -> list[Row]:
    """Rows from top to bottom: for each rank its training thread, then the links it used."""
    by_place: dict[tuple[int, str], list[Event]] = defaultdict(list)
    wanted = set(ranks)
    for event in events:
        if event.rank in wanted:
            by_place[event.rank, event.lane].append(event)
    found = []
    for rank in ranks:
        thread = _steps(by_place[rank, "compute"])
        # Later bars lie on top: what a step waits for is seen within the step.
        for lane in ("optimizer", "issue", *WAITS):
            thread += [Bar(lane, e.name, e.start_us, e.duration_us) for e in by_place[rank, lane]]
        found.append(Row(rank, "thread", thread))
        for lane in LANES:
            if lane not in THREAD_LANES and by_place[rank, lane]:
                found.append(
                    Row(rank, lane, [Bar(lane, e.name, e.start_us, e.duration_us) for e in by_place[rank, lane]])
                )
    return found


def _steps(events: list[Event]) -> list[Bar]:
    """One bar a step; the simulator records the parts of a step between two waits."""
    spans: dict[str, tuple[float, float]] = {}
    for event in events:
        start, end = spans.get(event.name, (event.start_us, 0.0))
        spans[event.name] = (min(start, event.start_us), max(end, event.end_us))
    return [Bar("F" if "F" in name else "B", name, start, end - start) for name, (start, end) in spans.items()]
