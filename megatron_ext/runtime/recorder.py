"""Collect what ran when on this rank, for traces and reports.

Times are CLOCK_MONOTONIC, which all processes of one machine share. Between machines the
clocks differ; each rank therefore stores the offset to the epoch once, and traces of several
nodes are aligned by it (to the accuracy of their time synchronisation).

[Note: Time on a device]
On CUDA a call returns when its work is queued, and a wait when the stream has been told to wait.
So what the device does (compute, waits, copies) is recorded between events on its stream, which
are read when all has been recorded; what the training thread itself does (issuing) by the clock.
This half has not yet been run on a GPU.
"""

import time

import torch

from megatron_ext.formats.trace import Event


class Recorder:
    """Appends ``(lane, name, start, end, iteration)``; safe from several threads.

    Args:
        on_device: whether :meth:`now` is where the current CUDA stream is, see [Note: Time on a device].
        iterations: those that are recorded, counted from 1; None records everything.
    """

    def __init__(self, rank: int, on_device: bool = False, iterations: range | None = None):
        self.rank, self.on_device, self.iterations = rank, on_device, iterations
        self.iteration = 0
        self.recording = iterations is None
        self.rows: list[tuple] = []
        self.epoch_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._base, self._base_ns = None, 0

    def now(self):
        """This moment of what computes, for :meth:`add`: nanoseconds, or an event on the current stream. On the
        training thread."""
        if not self.on_device:
            return time.perf_counter_ns()
        if self._base is None:
            self._base = event_here()
            self._base.synchronize()
            self._base_ns = time.perf_counter_ns()
        return event_here()

    def begin_iteration(self) -> None:
        """The next iteration of training begins."""
        self.iteration += 1
        self.recording = self.iterations is None or self.iteration in self.iterations

    def add(self, lane: str, name: str, start, end) -> None:
        """Record a span from ``start`` to ``end``: nanoseconds of ``perf_counter_ns``, or events with timing."""
        if self.recording:
            self.rows.append((lane, name, start, end, self.iteration))

    def timed(self, lane: str, name: str, function):
        """``function`` (no arguments) wrapped so that every call is recorded; waits are the device's, all else the
        thread's."""
        clock, rows = self.now if lane == "wait" else time.perf_counter_ns, self.rows

        def run():
            if not self.recording:
                function()
                return
            start = clock()
            function()
            rows.append((lane, name, start, clock(), self.iteration))

        return run

    def events(self) -> list[Event]:
        """Everything recorded so far, in microseconds since the epoch offset."""
        if self._base is not None:
            torch.cuda.synchronize()
        offset = self.epoch_offset_ns
        spans = [
            (lane, name, self._ns(start), self._ns(end), iteration) for lane, name, start, end, iteration in self.rows
        ]
        return [
            Event(self.rank, lane, name, (start + offset) / 1e3, (end - start) / 1e3, iteration)
            for lane, name, start, end, iteration in spans
        ]

    def _ns(self, moment) -> int:
        if isinstance(moment, int):
            return moment
        assert self._base is not None  # made before any event was
        return self._base_ns + round(self._base.elapsed_time(moment) * 1e6)


def event_here() -> torch.cuda.Event:
    """A timed event on the calling thread's current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
