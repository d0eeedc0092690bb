"""Interfaces inside the simulator: the engine as its parts see it, and its optional plug-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_ext.formats.trace import Lane
from megatron_ext.simulator.early_units import DelayedStep, EarlySteps
from megatron_ext.simulator.host_memory_link import HostMemoryLink
from megatron_ext.simulator.lower import Gather
from megatron_ext.simulator.rank_state import RankState


class EngineView(Protocol):
    """The engine as links and plug-ins see it. Times are microseconds since the last optimizer step."""

    now: float
    ranks: list[RankState]
    host_cpu: HostCpuModel | None
    host_memory: HostMemoryLink | None
    early: EarlySteps | None
    delayed: Sequence[DelayedStep]
    publish: list[list[tuple[int, int, float]]]

    def call_at(self, time: float, function: Callable[[float], None]) -> None: ...

    def gather_ended(self, rank: RankState, gather: Gather) -> None: ...

    def gradient_freed(self, rank: RankState) -> None: ...

    def start_optimizer(self, rank: RankState) -> None: ...

    def step_optimizer(self, rank: RankState, begin: float) -> None: ...

    def refresh_compute(self, ranks: list[RankState]) -> None: ...

    def record(self, rank: RankState, lane: Lane, name: str, start: float, duration: float) -> None: ...


class HostCpuModel(Protocol):
    """Optional plug-in: ranks of a node compute on processors that they share. Machines with GPUs have none."""

    def start(self, engine: EngineView) -> None:
        """Called once, before the first event."""
        ...

    def compute_begins(self, pp_rank: int, now: float) -> None: ...

    def compute_ends(self, pp_rank: int, now: float) -> None: ...

    def compute_speed(self, pp_rank: int) -> float:
        """Speed of the rank's compute relative to computing alone."""
        ...

    def computing_share(self, pp_rank: int) -> float:
        """Share of the ranks on the machine of ``pp_rank`` that compute now."""
        ...

    def share_of(self, kind: int, size_bytes: int, us: float, group: int | None) -> float:
        """Processors that a transport asks for while it runs alone; ``group`` is the one that is published, or None."""
        ...

    def ask(self, pp_rank: int, now: float, share: float) -> None:
        """The rank's transports ask for ``share`` more processors (fewer if negative)."""
        ...

    def send(self, engine: EngineView, sender: int, receiver: int, size_bytes: int, until: float) -> None:
        """A message between two pipeline ranks is on its way until ``until``."""
        ...

    def backlog_us(self, now: float) -> float:
        """Time until the optimizer can start: what transports have asked for and not received."""
        ...
