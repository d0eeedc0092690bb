"""A group of parameters at run time: its storage, its state, and its freshness.

[Note: Freshness]
``Clock.version`` counts the times that parameters changed (optimizer steps, a loaded
checkpoint). A whole copy carries the version of the shards it was gathered from; it may be
computed on only while the two are equal. Order alone proves nothing: a group that is never
gathered again would be whole, in order, and one optimizer step old.

[Note: Freed storage]
With zero stage 3 the bytes of a whole copy come and go while every tensor object stays: the
storage behind the bucket is resized to 0 and back, so that the parameters, and the views that
autograd saved in forward, are whole again when the bucket is. Bytes are restored through the
bucket tensor, which leaves the version counters of the parameters alone. On CUDA blocks are
taken and given back on the compute stream. Copies are issued behind an event of that stream
recorded after the block was taken, so that a block is never written while work queued
earlier still reads its previous contents.
Source: torch FSDP2, ``_fsdp_param.py`` (``alloc_storage``, ``free_storage``).
"""

from collections.abc import Callable
from enum import Enum

import torch

from megatron_ext.runtime.device import device_of


class ScheduleError(RuntimeError):
    """The run and the schedule disagree in a way that validation could not see."""


class GroupState(Enum):
    """SHARDED: only this rank's shard is valid. UNSHARDING: a gather is in flight.
    WHOLE: every byte is valid for the version that the group carries."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    WHOLE = "whole"


# Looking a member up in its enum takes as long as the rest of a transition.
_SHARDED, _UNSHARDING, _WHOLE = GroupState.SHARDED, GroupState.UNSHARDING, GroupState.WHOLE


class Clock:
    """The version of the parameters; one per run, shared by all groups."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 1


class WholeBytes:
    """Bytes of whole parameters on this rank's device: now, and the most since :meth:`restart`."""

    __slots__ = ("bytes", "peak")

    def __init__(self) -> None:
        self.bytes = self.peak = 0

    def add(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.peak:
            self.peak = self.bytes

    def restart(self) -> None:
        self.peak = self.bytes


class RankGroup:
    """Storage and state of one group on one rank; in this class the whole copy always has its bytes.

    Attributes:
        index: the group's id in the schedule.
        whole: 1D tensor, the whole bucket with Megatron's padding.
        shard: 1D view of ``whole``, this data-parallel rank's share.
        shard_start: element of ``whole`` at which the shard begins.
        version: the version that ``whole`` was gathered at.
        handle: handle of the gather in flight; None unless UNSHARDING.
        on_host: the shard rests in host memory.
        bytes: size of ``whole``.
        resize: resizes the storage of ``whole`` to a number of bytes; in this class it does nothing.
        residency: counts the bytes of ``whole`` while it has them; in this class a count of the group's own.
    """

    __slots__ = (
        *("index", "name", "whole", "shard", "shard_start", "state", "version", "handle", "on_host"),
        *("bytes", "resize", "residency"),
    )

    def __init__(self, index: int, name: str, whole: torch.Tensor, dp_rank: int, dp_size: int):
        assert whole.dim() == 1 and whole.numel() % dp_size == 0
        self.index, self.name, self.whole = index, name, whole
        numel = whole.numel() // dp_size
        self.shard_start = dp_rank * numel
        self.shard = whole.narrow(0, self.shard_start, numel)
        self.state, self.version, self.handle, self.on_host = _SHARDED, 0, None, False
        self.bytes, self.residency = whole.numel() * whole.element_size(), WholeBytes()
        self.resize: Callable[[int], object] = _keep_size

    def __str__(self) -> str:
        return f"group {self.index} ({self.name})"

    @property
    def dp_rank(self) -> int:
        """Index of this rank among those that share the shards."""
        return self.shard_start // self.shard.numel()

    # A step of the program calls functions without arguments, which hold what they need. Each argument that
    # functools.partial adds would cost another call from C.

    def unshard_action(self, issue: Callable, clock: Clock) -> Callable[[], None]:
        """A function that begins a gather of the clock's version with ``issue(group) -> handle``, which does not block.

        The function raises ScheduleError if the group is not sharded.
        """
        size, residency = self.bytes, self.residency

        def unshard() -> None:
            if self.state is not _SHARDED:
                raise ScheduleError(f"{self} is unsharded while {self.state.value}")
            self.resize(size)
            self.state = _UNSHARDING
            now = residency.bytes = residency.bytes + size  # calling Residency.add would take a fifth of an unshard
            if now > residency.peak:
                residency.peak = now
            self.version = clock.version
            self.handle = issue(self)

        return unshard

    def wait_action(self, clock: Clock) -> Callable[[], None]:
        """A function that waits until the gather has arrived: the group is then whole.

        The function raises ScheduleError if there is no gather, or if its version is not the clock's.
        """

        def wait() -> None:
            handle = self.handle
            if handle is None:
                raise ScheduleError(f"{self} is waited for but was not unsharded")
            handle.wait()
            if self.version != clock.version:
                raise ScheduleError(f"{self} was gathered at version {self.version}, parameters are at {clock.version}")
            self.handle = None
            self.state = _WHOLE

        return wait

    def unshard(self, issue: Callable, clock: Clock) -> None:
        """See :meth:`unshard_action`."""
        self.unshard_action(issue, clock)()

    def wait(self, clock: Clock) -> None:
        """See :meth:`wait_action`."""
        self.wait_action(clock)()

    def drop(self) -> None:
        """Invalidate the whole copy; waits for a gather that is still in flight."""
        if self.state is not _SHARDED:
            if self.handle is not None:
                self.handle.wait()
                self.handle = None
            self.state = _WHOLE
            self.reshard()

    def reshard(self) -> None:
        """Free a whole copy, as the schedule does."""
        if self.state is not _WHOLE:
            raise ScheduleError(f"{self} is freed while it is {self.state.value}")
        self.state = _SHARDED
        self.resize(0)
        self.residency.bytes -= self.bytes

    def adopt(self) -> None:
        """Copy the shard from the whole copy, whose values have changed."""

    def check_usable(self, clock: Clock) -> None:
        """Raise unless the group is whole and fresh; the debug mode calls it at every use."""
        if self.state is not _WHOLE or self.version != clock.version:
            raise ScheduleError(
                f"a step computes on {self} while it is {self.state.value} at version {self.version}; parameters are "
                f"at {clock.version}"
            )


def _host_copy(shard: torch.Tensor) -> torch.Tensor:
    return device_of(shard).host_tensor(shard.numel(), shard.dtype).copy_(shard)


def _keep_size(size: int) -> None:
    """Replaces the resize of a storage that is not resized."""


class FreedGroup(RankGroup):
    """A group whose whole copy has bytes only from its unshard to its reshard. The shard has its own
    storage, on the device or in host memory. Starts out whole. See [Note: Freed storage].

    Args:
        residency: counts the whole copies of all groups.
        on_host: the shard rests in host memory, page-locked where the whole copy is on a GPU.
    """

    __slots__ = ()

    def __init__(
        self,
        index: int,
        name: str,
        whole: torch.Tensor,
        dp_rank: int,
        dp_size: int,
        residency: WholeBytes,
        on_host: bool = False,
    ):
        super().__init__(index, name, whole, dp_rank, dp_size)
        assert whole.storage_offset() == 0 and whole.untyped_storage().nbytes() == self.bytes
        self.on_host = on_host
        with torch.no_grad():
            self.shard = _host_copy(self.shard) if on_host else self.shard.clone()
        self.resize, self.residency, self.state = device_of(whole).resizer(whole.untyped_storage()), residency, _WHOLE
        residency.add(self.bytes)

    def adopt(self) -> None:
        if self.state is _WHOLE:
            with torch.no_grad():
                self.shard.copy_(self.whole.narrow(0, self.shard_start, self.shard.numel()))
