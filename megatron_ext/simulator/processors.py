"""Processors that the ranks of a machine share: who computes, and what transports take.

[Note: Nothing is given away]
A transport takes its processor time evenly over as long as it lasts, but never so much that compute
has less than half of the processors. What it cannot have meanwhile it is owed: compute keeps that
half until it has been made good. So every microsecond that a table says a transport takes is missing
to compute, or is had from processors that would have been idle; and no schedule can be faster
than all of its processor time together. Without that, a host copy that takes 0.4 ms of each of two
ranks on one processor, and 1 ms beside their compute, would cost them half of what it takes.
"""

from __future__ import annotations

from collections.abc import Callable

ROUNDING = 1e-6
"""Microseconds owed that are no debt."""


class Processors:
    """Of one machine. ``load``: ranks that compute now; ``taken``: processors that transports ask for now;
    ``owed``: microseconds of a processor that they could not have yet.

    Args:
        count: how many ranks' worth of compute the machine does at once; None: every rank has its own.
        changed: called when the processors left to compute change.
        wake: ``wake(processors, time, version)``, to have :meth:`repaid` called with these then.
    """

    __slots__ = ("count", "load", "taken", "owed", "ranks", "_settled", "_version", "_changed", "_wake")

    def __init__(self, count: float | None, changed: Callable[[], None], wake: Callable[[Processors, float, int], None]):
        self.count, self._changed, self._wake = count, changed, wake
        self.load, self.taken, self.owed, self.ranks = 0, 0.0, 0.0, 0
        self._settled, self._version = 0.0, 0

    def left(self) -> float:
        """Processors that transports leave to compute."""
        allowed = self._allowed()
        return self.count - (allowed if self.owed or self.taken > allowed else self.taken)

    def speed(self) -> float:
        """Of a computing rank, by what it has alone: each gets an even share."""
        left = self.left()
        return left / self.load if self.load > left else 1.0

    def compute(self, now: float, ranks: int) -> None:
        """So many ranks more compute (fewer, below 0)."""
        self._change(now, ranks, 0.0)

    def take(self, now: float, share: float) -> None:
        """Transports take so much more (give back, below 0)."""
        self._change(now, 0, share)

    def repaid(self, now: float, version: int) -> None:
        if version == self._version:
            self.owed = 0.0
            self._settled = now
            self._changed()

    def owed_us(self, now: float) -> float:
        """How long the machine is still busy with what it owes when nothing else runs."""
        if self.count is None:
            return 0.0
        self._settle(now)
        return self.owed / self.count

    def _allowed(self) -> float:
        """Processors that transports may have: half, and what compute does not use."""
        return max(self.count - self.load, self.count / 2)

    def _settle(self, now: float) -> None:
        allowed = self._allowed()
        if self.owed or self.taken > allowed:
            owed = self.owed + (self.taken - allowed) * (now - self._settled)
            self.owed = owed if owed > ROUNDING else 0.0
        self._settled = now

    def _change(self, now: float, ranks: int, share: float) -> None:
        before = self.speed()  # what is made good just now changes it, too
        self._settle(now)
        self.load += ranks
        self.taken += share
        self._version += 1
        spare = self._allowed() - self.taken
        if self.owed and spare > 0.0:
            self._wake(self, now + self.owed / spare, self._version)
        if self.speed() != before:
            self._changed()
