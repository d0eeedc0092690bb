"""A group of parameters at run time: its storage, its state, and its freshness.

[Note: Freshness]
``Clock.version`` counts the times that parameters changed (optimizer steps, a loaded
checkpoint). A whole copy carries the version of the shards it was gathered from; it may be
computed on only while the two are equal. Order alone proves nothing: a group that is never
gathered again would be whole, in order, and one optimizer step old.
"""

from enum import Enum

import torch


class ScheduleError(RuntimeError):
    """The run and the schedule disagree in a way that validation could not see."""


class State(Enum):
    """SHARDED: only the own shard is valid. UNSHARDING: a gather is in flight.
    WHOLE: every byte is valid for the version the group carries."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    WHOLE = "whole"


class Clock:
    """The version of the parameters; one a run, shared by all groups."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 1


class Group:
    """Storage and state of one group on one rank.

    Attributes:
        index: the group's id in the schedule.
        whole: 1D tensor, the whole bucket with Megatron's padding.
        shard: 1D view of ``whole``, this data-parallel rank's share.
        version: the version that ``whole`` was gathered at.
        handle: what the gather in flight is waited by; None unless UNSHARDING.
    """

    __slots__ = ("index", "name", "whole", "shard", "state", "version", "handle")

    def __init__(self, index: int, name: str, whole: torch.Tensor, dp_rank: int, dp_size: int):
        assert whole.dim() == 1 and whole.numel() % dp_size == 0
        self.index, self.name, self.whole = index, name, whole
        numel = whole.numel() // dp_size
        self.shard = whole.narrow(0, dp_rank * numel, numel)
        self.state, self.version, self.handle = State.SHARDED, 0, None

    def __str__(self) -> str:
        return f"group {self.index} ({self.name})"

    @property
    def bytes(self) -> int:
        return self.whole.numel() * self.whole.element_size()

    def begin_unshard(self) -> None:
        if self.state is not State.SHARDED:
            raise ScheduleError(f"{self} is unsharded while {self.state.value}")
        self.state = State.UNSHARDING

    def end_unshard(self, clock: Clock) -> None:
        """The gather has arrived: whole now, and for this version or not at all."""
        if self.version != clock.version:
            raise ScheduleError(f"{self} was gathered at version {self.version}, parameters are at {clock.version}")
        self.handle = None
        self.state = State.WHOLE

    def check_usable(self, clock: Clock) -> None:
        """Raise unless the group is whole and fresh; the debug mode calls it at every use."""
        if self.state is not State.WHOLE or self.version != clock.version:
            raise ScheduleError(
                f"a step computes on {self} while it is {self.state.value} at version {self.version}; parameters are at {clock.version}"
            )
