"""Collect what ran when on this rank, for traces and reports.

Times are CLOCK_MONOTONIC, which all processes of one machine share. Between machines the
clocks differ; each rank therefore stores the offset to the epoch once, and traces of several
nodes are aligned by it (to the accuracy of their time synchronisation).
"""

import time

from megatron_ext.schedule.trace import Event


class Recorder:
    """Appends ``(lane, name, start_ns, end_ns, iteration)``; safe from several threads."""

    def __init__(self, rank: int):
        self.rank = rank
        self.iteration = 0
        self.rows: list[tuple[str, str, int, int, int]] = []
        self.epoch_offset_ns = time.time_ns() - time.perf_counter_ns()

    def add(self, lane: str, name: str, start_ns: int, end_ns: int) -> None:
        self.rows.append((lane, name, start_ns, end_ns, self.iteration))

    def timed(self, lane: str, name: str, function):
        """``function`` (no arguments) wrapped so that every call is recorded."""
        clock, rows = time.perf_counter_ns, self.rows

        def run():
            start = clock()
            function()
            rows.append((lane, name, start, clock(), self.iteration))

        return run

    def events(self) -> list[Event]:
        """Everything recorded so far, in microseconds since the epoch offset."""
        offset = self.epoch_offset_ns
        return [
            Event(self.rank, lane, name, (start + offset) / 1e3, (end - start) / 1e3, iteration)
            for lane, name, start, end, iteration in self.rows
        ]
