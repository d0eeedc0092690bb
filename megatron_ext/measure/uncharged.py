"""Processor time that the kernel takes for packets and charges to no process.

[Note: Who pays for packets]
Linux handles a packet where it arrives: within the process that happens to run there, which is charged with it, or
on an idle processor, where nobody is. Gathers are measured alone, so processors are idle while a link is busy; beside
training none is, and the same work is missing to compute. What processors were not idle for
(``/proc/stat``, proc_stat(5)), less what all ranks were charged with, is that work. Idle time is counted in steps of 10 ms, so it is
told of a whole curve, by byte, not of every size.
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
"""How long to look at processors that have nothing to do: within less, steps of 10 ms tell nothing."""


class Spent(NamedTuple):
    """Over some time: how long it was, what this rank was charged with, what its processors were not idle for
    (microseconds, the last summed over processors), and the bytes of this rank's transfers in it."""

    wall_us: float = 0.0
    charged_us: float = 0.0
    busy_us: float = 0.0
    bytes: int = 0


def idle_us(text: str, processors: frozenset[int], ticks_per_second: int) -> float:
    """What ``processors`` had not to do, or not from their host, until now: idle, iowait and steal of ``/proc/stat``."""
    ticks = 0
    for line in text.splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in processors:
            ticks += int(fields[3]) + int(fields[4]) + int(fields[7])
    return ticks * 1e6 / ticks_per_second


class Uncharged:
    """Watches the visits of every curve on this rank. ``active`` where ranks compute on processors and the kernel tells.

    Args:
        seconds: how long to look at the processors while no rank does anything, within :data:`QUIET_SECONDS`.
    """

    def __init__(self, fabric: Fabric, seconds: float):
        self._fabric = fabric
        # One answer for all ranks, as they exchange what they saw.
        self.active = bool(fabric.agree(int(fabric.torch_device.type == "cpu" and STAT.exists())))
        self._processors = frozenset(os.sched_getaffinity(0)) if self.active else frozenset()
        self._quiet, self._own = Spent(), {}
        if self.active:
            fabric.barrier()
            before = self._now()
            shortest, longest = QUIET_SECONDS
            sleep(min(max(seconds, shortest), longest))
            self._quiet = self._since(before)
            fabric.barrier()

    def _now(self) -> Spent:
        wall_us = perf_counter() * 1e6
        idle = idle_us(STAT.read_text(), self._processors, os.sysconf("SC_CLK_TCK"))
        return Spent(wall_us, process_time() * 1e6, wall_us * len(self._processors) - idle)

    def _since(self, before: Spent) -> Spent:
        return Spent(*(now - then for now, then in zip(self._now(), before)))

    def watch(self, name: str, size_bytes: int, visit: Callable[[], Samples]) -> Samples:
        """What ``visit``, a visit of curve ``name`` at ``size_bytes``, returns."""
        if not self.active or name not in NETWORKED:
            return visit()
        before = self._now()
        samples = visit()
        spent = self._since(before)._replace(bytes=samples.transfers * size_bytes)
        self._own[name] = Spent(*(one + other for one, other in zip(self._own.get(name, Spent()), spent)))
        return samples

    def us_per_byte(self, kernel: str) -> dict[str, float]:
        """By curve, microseconds of a processor for a byte of one rank. Collective.

        Args:
            kernel: what ranks on one machine have in common.
        """
        if not self.active:
            return {}
        everyone: list = [None] * self._fabric.world_size
        dist.all_gather_object(everyone, ((kernel, self._processors), self._quiet, self._own))
        return per_byte(everyone)


def per_byte(everyone: Sequence[tuple[Hashable, Spent, Mapping[str, Spent]]]) -> dict[str, float]:
    """By curve, what kernels took and charged to no rank, in microseconds by byte; never below 0.

    Args:
        everyone: of every rank what those that use the same processors have in common, what was spent while
            nothing was done, and what was by curve.
    """
    machines: dict[Hashable, list[tuple[Spent, Mapping[str, Spent]]]] = {}
    for processors, quiet, own in everyone:
        machines.setdefault(processors, []).append((quiet, own))
    found = {}
    for name in sorted({name for *_, own in everyone for name in own}):
        us, moved = 0.0, 0
        for ranks in machines.values():
            quiet = _not_charged([one for one, _ in ranks])
            spent = [own.get(name, Spent()) for _, own in ranks]
            background = quiet / ranks[0][0].wall_us * max(one.wall_us for one in spent) if ranks[0][0].wall_us else 0.0
            us += max(_not_charged(spent) - background, 0.0)
            moved += sum(one.bytes for one in spent)
        if moved:
            found[name] = us / moved
    return found


def _not_charged(ranks: Sequence[Spent]) -> float:
    """Every rank of a machine sees the same processors: the middle one's reading, less what all were charged with."""
    busy = sorted(one.busy_us for one in ranks)[len(ranks) // 2]
    return busy - sum(one.charged_us for one in ranks)
