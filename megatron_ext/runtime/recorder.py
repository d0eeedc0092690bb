"""Records what ran when on this rank, for traces and reports.

Times are CLOCK_MONOTONIC, which all processes of one machine share. The clocks of several
machines differ. Each rank therefore stores the offset to the epoch once, and traces of several
nodes are aligned by it (to the accuracy of their time synchronisation).

[Note: Time on a device]
On CUDA a call returns when its work is queued, and a wait returns when the stream has been told to wait.
So the device's activity (compute, waits, copies) is recorded between events on its stream, which
are read when all has been recorded. The training thread's own activity (issuing) is recorded by the clock.
The time between two events is a float32 of milliseconds: after an hour its resolution is 250 us. So every iteration has
a base event of its own, which is timed from the previous base, and a duration is read between its own two events.
Source: cudaEventElapsedTime, whose result is a float. On a GPU this has run for sampled iterations, not for a full
trace.
"""

import time
from typing import NamedTuple

import torch

from megatron_ext.formats.moved_bytes import Kind, Link, MovedBytes, Row, add_up
from megatron_ext.formats.trace import WAITS, Event, Lane


class Recorder:
    """Appends ``(lane, name, start, end, iteration)``; safe from several threads.

    Args:
        on_device: :meth:`now` gives the time of the current CUDA stream, see [Note: Time on a device].
        iterations: the iterations to record, counted from 1; None: record all, and count bytes.

    Attributes:
        counts: whether bytes are counted.
        began_ns: when the training thread began the iteration; only on a device.
        counted: bytes moved by iteration, from the end of the previous optimizer step to the end of its own.
    """

    def __init__(self, rank: int, on_device: bool = False, iterations: range | None = None):
        self.rank, self.on_device, self.iterations = rank, on_device, iterations
        self.iteration = 0
        self.recording = self.counts = iterations is None
        self.rows: list[tuple] = []
        self.epoch_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._bases: dict[int, torch.cuda.Event] = {}  # by iteration, in order
        self._first_base_ns = self.began_ns = 0
        self.counted: dict[int, MovedBytes] = {}
        self._moved: list[Row] = []

    def now(self):
        """The current time of the compute, for :meth:`add`: nanoseconds, or an event on the current stream. Call it on
        the training thread."""
        if not self.on_device:
            return time.perf_counter_ns()
        if not self._bases:
            self._add_base()
        return event_here()

    def _add_base(self) -> None:
        base = event_here()
        if not self._bases:  # only the first base is timed by the clock
            base.synchronize()
            self._first_base_ns = time.perf_counter_ns()
        self._bases[self.iteration] = base

    def begin_iteration(self) -> None:
        """The next iteration of training begins."""
        self.iteration += 1
        self.recording = self.iterations is None or self.iteration in self.iterations
        if self.on_device and self.recording:
            self._add_base()
            self.began_ns = time.perf_counter_ns()

    def add(self, lane: str, name: str, start, end) -> None:
        """Record a span from ``start`` to ``end``: nanoseconds of ``perf_counter_ns``, or events with timing."""
        if self.recording:
            self.rows.append((lane, name, start, end, self.iteration))

    def timed(self, lane: str, name: str, function):
        """Wrap ``function`` (no arguments) so that every call is recorded. Waits are timed on the device, everything
        else on the thread."""
        clock, rows = self.now if lane in WAITS else time.perf_counter_ns, self.rows

        def run():
            if not self.recording:
                function()
                return
            start = clock()
            function()
            rows.append((lane, name, start, clock(), self.iteration))

        return run

    def add_end(self, lane: str, name: str, start, handle) -> bool:
        """Record the collective of ``handle`` (one work, or several that were coalesced) from ``start`` to its end.
        Returns False where the end cannot be known: on a device, where the future of a work is done when the work is
        queued, and with a fork's own handle, which has no future."""
        works = getattr(handle, "works", None) or [handle]
        if self.on_device or not self.recording or not all(hasattr(work, "get_future") for work in works):
            return False
        ended = torch.futures.collect_all([work.get_future() for work in works])
        ended.add_done_callback(lambda _: self.add(lane, name, start, time.perf_counter_ns()))
        return True

    def moved(self, kind: Kind, link: Link, size_bytes: int) -> None:
        """Count bytes that move once, if all iterations are recorded."""
        if self.counts:
            self._moved.append((kind, link, size_bytes))

    def end_count(self) -> None:
        """The optimizer has stepped or skipped its step: bytes from now on count for the next iteration."""
        if self.counts and self.iteration not in self.counted:
            rows, self._moved = self._moved, []
            self.counted[self.iteration] = add_up(rows)

    def events(self) -> list[Event]:
        """Everything recorded so far, in microseconds since the epoch offset. On a device, copies of a run that ended
        before its first iteration have no times."""
        if self._bases:
            torch.cuda.synchronize()
        base_ns = self._base_times_ns()
        begin_us = lambda start, iteration: (self._ns(start, iteration, base_ns) + self.epoch_offset_ns) / 1e3
        return [
            Event(self.rank, lane, name, begin_us(start, iteration), _us(start, end), iteration)
            for lane, name, start, end, iteration in self.rows
            if self._bases or isinstance(start, int)
        ]

    def _base_times_ns(self) -> dict[int, int]:
        """Time of each base event, by iteration."""
        times, before = {}, None
        for iteration, base in self._bases.items():
            times[iteration] = self._first_base_ns if before is None else times[before] + _ns(self._bases[before], base)
            before = iteration
        return times

    def _ns(self, moment, iteration: int, base_ns: dict[int, int]) -> int:
        if isinstance(moment, int):
            return moment
        # Copies may be recorded before the training thread has made the first base.
        nearest = max((i for i in base_ns if i <= iteration), default=min(base_ns))
        return base_ns[nearest] + _ns(self._bases[nearest], moment)


NOTHING = Recorder(0, iterations=range(0))
"""Records and counts nothing."""


def _ns(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(begin.elapsed_time(end) * 1e6)


def _us(start, end) -> float:
    return (end - start if isinstance(start, int) else _ns(start, end)) / 1e3


class CopyLog(NamedTuple):
    """Counts and records the copies of one stream.

    Attributes:
        lane, name: lane and name of their events; a copy may have its own name.
    """

    recorder: Recorder
    kind: Kind
    link: Link
    lane: Lane
    name: str

    def count(self, size_bytes: int) -> None:
        """A copy is issued."""
        self.recorder.moved(self.kind, self.link, size_bytes)

    def add(self, name: str, begin, end) -> None:
        """A copy ran from ``begin`` to ``end``, given as for :meth:`Recorder.add`."""
        self.recorder.add(self.lane, name or self.name, begin, end)


def log_of(recorder: Recorder, kind: Kind, link: Link, lane: Lane, name: str = "") -> CopyLog | None:
    """A log for :attr:`Stream.log`; None if nothing is recorded."""
    return None if recorder is NOTHING else CopyLog(recorder, kind, link, lane, name)


def event_here() -> torch.cuda.Event:
    """A timed event on the calling thread's current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
