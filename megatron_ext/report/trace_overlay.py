"""Several traces of one iteration in one Chrome trace, so that they lie over each other.

Each trace becomes a process for every rank, with the lanes as threads; all begin at 0.
Perfetto shows the processes of one rank under each other, in the order of the traces.
Source: "Trace Event Format" of the Chromium project.
"""

from collections.abc import Iterable, Mapping

from megatron_ext.formats import json_files
from megatron_ext.formats.trace import LANES, Event


def overlay(traces: Mapping[str, Iterable[Event]]) -> dict:
    """``traces``: events by name, times in microseconds from the same moment of an iteration."""
    events: list[dict] = []
    for number, (name, mine) in enumerate(traces.items()):
        mine = list(mine)
        for rank in sorted({event.rank for event in mine}):
            pid = _process(rank, number, len(traces))
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {rank}: {name}"}})
            events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
            used = {event.lane for event in mine if event.rank == rank}
            for tid, lane in enumerate(LANES):
                if lane in used:
                    events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}})
        events += [
            {
                "name": event.name,
                "cat": event.lane,
                "ph": "X",
                "pid": _process(event.rank, number, len(traces)),
                "tid": LANES.index(event.lane),
                "ts": round(event.start_us, 3),
                "dur": round(event.duration_us, 3),
                "args": {"trace": name, "rank": event.rank},
            }
            for event in mine
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"kind": "overlay", "traces": list(traces)}}


def _process(rank: int, number: int, count: int) -> int:
    # From 1: viewers give process 0 a meaning of its own.
    return 1 + rank * count + number


def save(path, traces: Mapping[str, Iterable[Event]]) -> None:
    """Write the overlay. Raises InputError where the place cannot be written."""
    json_files.save(path, overlay(traces))
