"""Softirq time: processor time that the kernel spends on packets and charges to no process.

[Note: Softirq time]
Linux handles a packet on the processor where it arrives. If a process runs there, the process is charged with the time;
if the processor is idle, nobody is. Gathers are measured alone, so processors are idle while a link is busy. During
training no processor is idle, and compute loses this time.

    softirq time = time in which processors were not idle (``/proc/stat``, proc_stat(5)) - time charged to all ranks

Idle time is counted in steps of 10 ms. So the result is given per byte for a whole curve, not for every size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import NamedTuple

import torch.distributed as dist

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.sampling import Samples

STAT = Path("/proc/stat")

NETWORKED = {"gpu", "hierarchical", "internode", "reduce", "p2p"}
"""Curves whose bytes go through sockets between processes; copies are done by the rank that is charged with them."""

QUIET_SECONDS = (0.2, 2.0)
"""Least and most seconds for which idle processors are watched: a shorter time is too few steps of 10 ms."""


class Spent(NamedTuple):
    """Over some time: how long it was, what this rank was charged with, what its processors were not idle for
    (microseconds, the last summed over processors), and the bytes of this rank's transfers in it."""

    wall_us: float = 0.0
    charged_us: float = 0.0
    busy_us: float = 0.0
    bytes: int = 0


def idle_us(text: str, processors: frozenset[int], ticks_per_second: int) -> float:
    """Idle, iowait and steal time of ``processors`` since boot, in microseconds, from the ``text`` of
    ``/proc/stat``."""
    ticks = 0
    for line in text.splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in processors:
            ticks += int(fields[3]) + int(fields[4]) + int(fields[7])
    return ticks * 1e6 / ticks_per_second


class SoftirqTime:
    """Watches the visits of every curve on this rank. ``active`` where ranks compute on the CPU and ``/proc/stat``
    exists.

    Args:
        seconds: how long to look at the processors while no rank does anything, within :data:`QUIET_SECONDS`.
    """

    def __init__(self, fabric: Fabric, seconds: float):
        self._fabric = fabric
        # One answer for all ranks, as they exchange what they saw.
        self.active = bool(fabric.agree(int(fabric.torch_device.type == "cpu" and STAT.exists())))
        self._processors = frozenset(os.sched_getaffinity(0)) if self.active else frozenset()
        self.quiet, self._own = Spent(), {}
        if self.active:
            fabric.barrier()
            before = self._now()
            shortest, longest = QUIET_SECONDS
            sleep(min(max(seconds, shortest), longest))
            self.quiet = self._since(before)
            fabric.barrier()

    def _now(self) -> Spent:
        wall_us = perf_counter() * 1e6
        idle = idle_us(STAT.read_text(), self._processors, os.sysconf("SC_CLK_TCK"))
        return Spent(wall_us, process_time() * 1e6, wall_us * len(self._processors) - idle)

    def _since(self, before: Spent) -> Spent:
        return Spent._make(now - then for now, then in zip(self._now(), before))

    def watch(self, name: str, size_bytes: int, visit: Callable[[], Samples]) -> Samples:
        """Run ``visit``, a visit of curve ``name`` at ``size_bytes``, count its softirq time, and return its
        samples."""
        if not self.active or name not in NETWORKED:
            return visit()
        before = self._now()
        samples = visit()
        spent = self._since(before)._replace(bytes=samples.transfers * size_bytes)
        self._own[name] = Spent(*(one + other for one, other in zip(self._own.get(name, Spent()), spent)))
        return samples

    def us_per_byte(self, kernel: str) -> dict[str, float]:
        """Softirq time by curve, in microseconds for each byte of one rank. Collective.

        Args:
            kernel: the same text for all ranks of one machine.
        """
        if not self.active:
            return {}
        everyone: list = [None] * self._fabric.world_size
        dist.all_gather_object(everyone, ((kernel, self._processors), self.quiet, self._own))
        return per_byte(everyone)


def per_byte(everyone: Sequence[tuple[Hashable, Spent, Mapping[str, Spent]]]) -> dict[str, float]:
    """Softirq time by curve, in microseconds per byte; never below 0.

    Args:
        everyone: of every rank a key that ranks on the same processors share, the time spent while no rank did
            anything, and the time spent by curve.
    """
    machines: dict[Hashable, list[tuple[Spent, Mapping[str, Spent]]]] = {}
    for processors, quiet, own in everyone:
        machines.setdefault(processors, []).append((quiet, own))
    found = {}
    for name in sorted({name for *_, own in everyone for name in own}):
        us, moved = 0.0, 0
        for ranks in machines.values():
            quiet = _softirq_us([one for one, _ in ranks])
            spent = [own.get(name, Spent()) for _, own in ranks]
            background = quiet / ranks[0][0].wall_us * max(one.wall_us for one in spent) if ranks[0][0].wall_us else 0.0
            us += max(_softirq_us(spent) - background, 0.0)
            moved += sum(one.bytes for one in spent)
        if moved:
            found[name] = us / moved
    return found


def _softirq_us(ranks: Sequence[Spent]) -> float:
    """Softirq time of one machine: busy time, as the median rank read it, less the time charged to all of its ranks."""
    busy = sorted(one.busy_us for one in ranks)[len(ranks) // 2]
    return busy - sum(one.charged_us for one in ranks)
