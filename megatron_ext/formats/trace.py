"""Traces: what ran when, simulated or measured, in one form.

The file has Chrome's trace event format, which Perfetto and chrome://tracing open: one
process per rank, one thread per lane. The simulator and the runtime write the same lanes, so
that one picture can show both.
Source: "Trace Event Format" of the Chromium project.
"""

from typing import Literal, NamedTuple, get_args

import msgspec

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.moved_bytes import MovedBytes

Lane = Literal[
    "compute",
    "wait",
    "gpu",
    "cpu",
    "nvme",
    "publish",
    "p2p",
    "reduce",
    "optimizer",
    "issue",
    "host_step",
    "host_add",
    "reduce_wait",
    "launches",
]
LANES = get_args(Lane)
"""``compute``: steps. ``wait``: exposed time, in which a step waits for a group. ``gpu``, ``cpu``, ``nvme``, ``p2p``:
links. ``issue``: the training thread's own time to issue gathers. ``optimizer``: the whole step; its name is ``skipped
step`` if it changed nothing. ``host_step``: the host's optimizer steps a group; waits for its states from a drive are
left out. ``reduce_wait``: the training thread waits until a gradient that comes and goes is reduced. ``launches``: on a
device, the training thread's time from the beginning of an iteration until it has issued the last step. Copies of
gradients and new parameters to the host are in ``publish``; copies of new parameters to the device are in ``cpu``."""

WAITS: tuple[Lane, ...] = ("wait", "reduce_wait")
"""Lanes in which the training thread or the compute stream waits."""

END_NOT_KNOWN = "unshard, end not known"
"""Name of a gather whose end is not known. Its event ends when the wait for it returns, which is later."""


class Event(NamedTuple):
    """One interval of one lane of one global rank; times in microseconds."""

    rank: int
    lane: Lane
    name: str
    start_us: float
    duration_us: float
    iteration: int = 0

    @property
    def end_us(self) -> float:
        """Time at which the event ends."""
        return self.start_us + self.duration_us


class AboutTraining(msgspec.Struct, frozen=True):
    """What a training run says about itself in the trace that it writes. None: a trace of an earlier version does not
    say it.

    ``scheduled``: whether it trained by a schedule (Megatron itself gathers in the reference of an equality check),
    ``schedule_sha256``: by which one. ``on_device``: steps and waits were recorded on a device, while the training
    thread issued. ``moved_bytes``: by rank and iteration.
    """

    scheduled: bool | None = None
    schedule_sha256: str | None = None
    on_device: bool | None = None
    moved_bytes: list[list[MovedBytes]] = []
    kind: str = "measured"


class _Args(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    iteration: int = 0


class _ChromeEvent(msgspec.Struct, forbid_unknown_fields=False):
    name: str
    ph: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = _Args()


class _ChromeTrace(msgspec.Struct, forbid_unknown_fields=False):
    traceEvents: list[_ChromeEvent]
    otherData: dict = {}


def save(path, events: list[Event], *, about: dict | AboutTraining | None = None) -> None:
    """Write ``events`` as a Chrome trace; ``about`` (kind, metadata) is stored in ``otherData``."""
    rows: list[dict] = []
    for rank in sorted({event.rank for event in events}):
        rows.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for tid, lane in enumerate(LANES):
            rows.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": lane}})
    for event in events:
        place = {"pid": event.rank, "tid": LANES.index(event.lane), "args": {"iteration": event.iteration}}
        times = {"ts": round(event.start_us, 3), "dur": round(event.duration_us, 3)}
        rows.append({"name": event.name, "ph": "X", **place, **times})
    json_files.save(path, {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about or {}})


def load(path) -> tuple[list[Event], dict]:
    """Read a trace that :func:`save` wrote: its events, and its ``about``.

    Raises:
        InputError: the file is not such a trace.
    """
    trace = json_files.load(path, _ChromeTrace)
    events = []
    for index, row in enumerate(trace.traceEvents):
        if row.ph != "X":
            continue
        if not 0 <= row.tid < len(LANES):
            said = f"there are {len(LANES)} lanes"
            raise InputError(said, file=path, field=f"traceEvents[{index}].tid", value=row.tid)
        if row.dur < 0:
            said = "an interval cannot end before it begins"
            raise InputError(said, file=path, field=f"traceEvents[{index}].dur", value=row.dur)
        events.append(Event(row.pid, LANES[row.tid], row.name, row.ts, row.dur, row.args.iteration))
    return events, trace.otherData
