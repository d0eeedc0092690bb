"""Plug-in of the engine for machines without GPUs: the ranks of a node compute on processors that they share.

[Note: Backlog]
A transport asks for its processor time evenly over its duration. Transports together get at most half of the
processors, and what compute leaves idle. What they do not get at once is a backlog: they keep that half until the
backlog is drained. So all processor time that the table charges to a transport is missing to compute at some time,
unless processors were idle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_ext.simulator.activity_kinds import P2P
from megatron_ext.simulator.engine_protocols import EngineView
from megatron_ext.simulator.processor_times import ProcessorTimes
from megatron_ext.simulator.rank_state import RankState

ROUNDING = 1e-6
"""A backlog of fewer microseconds is rounding."""


class SharedProcessors:
    """The processors of one machine while it is simulated.

    Args:
        count: how many ranks' worth of compute the machine does at once.
        changed: called when the processors left to compute change.
        wake: ``wake(processors, time, version)`` has :meth:`drained` called with ``(time, version)``.

    Attributes:
        load: ranks that compute now.
        asked: processors that transports ask for now.
        backlog: microseconds of a processor that transports have asked for and not received.
        ranks: ranks on the machine.
    """

    __slots__ = ("count", "load", "asked", "backlog", "ranks", "_settled", "_version", "_changed", "_wake")

    def __init__(self, count: float, changed: Callable[[], None], wake: Callable[[SharedProcessors, float, int], None]):
        self.count, self._changed, self._wake = count, changed, wake
        self.load, self.asked, self.backlog, self.ranks = 0, 0.0, 0.0, 0
        self._settled, self._version = 0.0, 0

    def left(self) -> float:
        """Processors that transports leave to compute."""
        allowed = self._allowed()
        return self.count - (allowed if self.backlog or self.asked > allowed else self.asked)

    def speed(self) -> float:
        """Speed of a computing rank relative to computing alone: every rank gets an even share."""
        left = self.left()
        return left / self.load if self.load > left else 1.0

    def change_load(self, now: float, ranks: int) -> None:
        """``ranks`` more ranks compute (fewer if negative)."""
        self._change(now, ranks, 0.0)

    def change_asked(self, now: float, share: float) -> None:
        """Transports ask for ``share`` more processors (fewer if negative)."""
        self._change(now, 0, share)

    def drained(self, now: float, version: int) -> None:
        """The backlog is empty, unless something has changed since this was announced."""
        if version == self._version:
            self.backlog = 0.0
            self._settled = now
            self._changed()

    def backlog_us(self, now: float) -> float:
        """How long the machine takes for the backlog when nothing else runs."""
        self._settle(now)
        return self.backlog / self.count

    def _allowed(self) -> float:
        """Processors that transports may use: half of them, and what compute leaves idle."""
        return max(self.count - self.load, self.count / 2)

    def _settle(self, now: float) -> None:
        allowed = self._allowed()
        if self.backlog or self.asked > allowed:
            backlog = self.backlog + (self.asked - allowed) * (now - self._settled)
            self.backlog = backlog if backlog > ROUNDING else 0.0
        self._settled = now

    def _change(self, now: float, ranks: int, share: float) -> None:
        before = self.speed()  # a backlog that is drained at this moment changes it, too
        self._settle(now)
        self.load += ranks
        self.asked += share
        self._version += 1
        spare = self._allowed() - self.asked
        if self.backlog and spare > 0.0:
            self._wake(self, now + self.backlog / spare, self._version)
        if self.speed() != before:
            self._changed()


class HostProcessors:
    """The engine's ``host_cpu``: the processors of all machines during one simulated iteration.

    Args:
        times: look-ups in the cost table.
        publish_us: processor time of publishing, by group.
    """

    def __init__(self, times: ProcessorTimes, publish_us: dict[int, float]):
        self.times, self.publish_us = times, publish_us
        self._of_rank: dict[int, tuple[SharedProcessors, int]] = {}

    def start(self, engine: EngineView) -> None:
        """Make the machines of the engine's ranks; called once, before the first event."""
        on_machine: dict[int, list[RankState]] = {}
        for rank in engine.ranks:
            on_machine.setdefault(self.times.machine_of(rank.pp_rank, 0), []).append(rank)

        def wake(processors: SharedProcessors, time: float, version: int) -> None:
            engine.call_at(time, lambda now: processors.drained(now, version))

        for ranks in on_machine.values():
            processors = SharedProcessors(self.times.count, partial(engine.refresh_compute, ranks), wake)
            for rank in ranks:
                replicas = self.times.replicas(rank.pp_rank)
                self._of_rank[rank.pp_rank] = processors, replicas
                processors.ranks += replicas

    def compute_begins(self, pp_rank: int, now: float) -> None:
        processors, replicas = self._of_rank[pp_rank]
        processors.change_load(now, replicas)

    def compute_ends(self, pp_rank: int, now: float) -> None:
        processors, replicas = self._of_rank[pp_rank]
        processors.change_load(now, -replicas)

    def compute_speed(self, pp_rank: int) -> float:
        """Speed of the rank's compute relative to computing alone."""
        return self._of_rank[pp_rank][0].speed()

    def computing_share(self, pp_rank: int) -> float:
        """Share of the ranks on the machine of ``pp_rank`` that compute now."""
        processors, _ = self._of_rank[pp_rank]
        return processors.load / processors.ranks

    def share_of(self, kind: int, size_bytes: int, us: float, group: int | None) -> float:
        """Processors that a transport asks for while it runs alone; ``group`` is the one that is published, or None."""
        if not self.times.takes[kind] or not us:
            return 0.0
        return (self.times.of_kind(kind, size_bytes) if group is None else self.publish_us[group]) / us

    def ask(self, pp_rank: int, now: float, share: float) -> None:
        """Every replica of the rank asks for ``share`` more processors (fewer if negative)."""
        processors, replicas = self._of_rank[pp_rank]
        processors.change_asked(now, share * replicas)

    def send(self, engine: EngineView, sender: int, receiver: int, size_bytes: int, until: float) -> None:
        """A message between two pipeline ranks takes processors at both ends until ``until``."""
        if not self.times.takes[P2P]:
            return
        share = self.times.of_kind(P2P, size_bytes) / (until - engine.now)
        for pp_rank in (sender, receiver):
            self.ask(pp_rank, engine.now, share)

        def release(now: float) -> None:
            for pp_rank in (sender, receiver):
                self.ask(pp_rank, now, -share)

        engine.call_at(until, release)

    def backlog_us(self, now: float) -> float:
        """How long the slowest machine takes for its backlog when nothing else runs."""
        return max(processors.backlog_us(now) for processors, _ in self._of_rank.values())
