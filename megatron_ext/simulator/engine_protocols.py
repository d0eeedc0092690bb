"""The interface of the engine that links use."""

from collections.abc import Sequence
from typing import Protocol

from megatron_ext.formats.trace import Event, Lane
from megatron_ext.simulator.early_units import DelayedStep, EarlySteps
from megatron_ext.simulator.host_memory_link import HostMemoryLink
from megatron_ext.simulator.rank_programs import Gather
from megatron_ext.simulator.rank_state import RankState


class EngineView(Protocol):
    """The engine as links see it. Times are microseconds since the last optimizer step."""

    now: float
    events: list[Event] | None
    ranks: list[RankState]
    host_memory: HostMemoryLink | None
    early: EarlySteps | None
    delayed: Sequence[DelayedStep]
    publish: list[list[tuple[int, int, float]]]

    def gather_ended(self, rank: RankState, gather: Gather) -> None: ...

    def host_stepped(self, rank: RankState, name: str, begin: float, step_us: float, drive_us: float) -> None: ...

    def gradient_freed(self, rank: RankState) -> None: ...

    def start_optimizer(self, rank: RankState) -> None: ...

    def step_optimizer(self, rank: RankState, begin: float) -> None: ...

    def record(self, rank: RankState, lane: Lane, name: str, start: float, duration: float) -> None: ...
