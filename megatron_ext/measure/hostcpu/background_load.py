"""Background load: how many processors other programs keep busy during a measurement (Linux)."""

from __future__ import annotations

import os
import time


class BackgroundLoad:
    """Counts from its construction on. Children count as part of this program once they have ended."""

    def __init__(self) -> None:
        self._start = self._now()

    def processors(self) -> float:
        """Processors that other programs kept busy on average; 0 where the kernel does not tell."""
        elapsed, busy, own = (now - then for now, then in zip(self._now(), self._start))
        return max((busy - own) / elapsed, 0.0)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(seconds, busy seconds of all processors, seconds of this program and its ended children)."""
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        try:
            with open("/proc/stat") as stat:
                user, nice, system, _, _, irq, softirq, steal, *_ = map(int, stat.readline().split()[1:])
        except (OSError, ValueError):
            return time.monotonic(), own, own
        return time.monotonic(), (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own
