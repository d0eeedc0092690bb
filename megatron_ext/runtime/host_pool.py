"""The node's host copy: one block of memory that the data-parallel ranks of a node share.

[Note: Versions in shared memory]
A rank publishes its shard (and, where there are several nodes, those it has received from its counterparts on the
others) by copying it and then storing the parameters' version into a flag of its own. A reader waits for the flags of
all shards before it copies. Where a stream copies the shard, a stream stores the flag; where a thread does (from the
host's optimizer, from another node, to the drive), the thread. A group's copy on the drive has flags of its own.
Before a rank overwrites what iteration n read, it waits until every rank of the node has stored n into its
``reads_done`` flag, so nobody reads a mixture. (Iterations are counted, not versions: after a skipped optimizer step
one version is read by two iterations.) ``reads_done`` is stored by the compute stream, behind its waits for the copies.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import block_pages, shared_block
from megatron_ext.runtime.flags import DeviceFlag, Flag, HostFlag, flags_bytes, open_flags
from megatron_ext.runtime.group import Group

FAILED = -1
"""Value of the flags of a rank that cannot publish any more."""

COPY, DRIVE = 0, 1
"""Rows of flags of each published group: of its host copy, and of its copy on the drive."""


class PeerLost(RuntimeError):
    """A rank of this node is gone, or cannot publish, while others wait for it."""


class HostPool:
    """Host copies and flags of published groups, mapped into this rank.

    Args:
        groups: published groups, the same list on every rank of the pool.
        copied: indices of those that have a host copy; the others have only flags.
        by_thread: indices of those whose host copy threads write.
        rank: this rank's index in the pool (among the data-parallel ranks on the node).
        size: number of ranks in the pool.
        exchange: collective ``exchange(object) -> list`` over exactly the pool's ranks.
        device: page-locks the block, see :meth:`pin`.
        progress: called with the bytes of this rank's pages that are allocated, and the bytes of all of them.
        on_drive: indices of those that have a copy on the drive.

    Attributes:
        memory: the whole block as uint8, flags included; page-locked as one region.
        copies: host copies by group index, 1D.
        reads_done: flags by rank: iterations that have ended there.

    Raises:
        InputError: another rank's block cannot be opened, there is no memory for it, or this machine cannot order
            stores (see flags.py).
    """

    def __init__(
        self,
        groups: list[Group],
        copied: set[int],
        by_thread: set[int],
        rank: int,
        size: int,
        exchange,
        device,
        progress: Callable[[int, int], None] = lambda done, total: None,
        on_drive: frozenset[int] = frozenset(),
    ):
        self.rank, self.size, self._device, self._by_thread = rank, size, device, by_thread
        self._awaited = [(index, COPY) for index in copied] + [(index, DRIVE) for index in on_drive]
        self._number = {group.index: n for n, group in enumerate(groups)}
        self._rows = 2 * len(groups) + 1
        offset = -(-flags_bytes(self._rows, size) // mmap.PAGESIZE) * mmap.PAGESIZE
        offsets = {}
        hosted = [group for group in groups if group.index in copied]
        for group in hosted:
            offsets[group.index] = offset
            offset += -(-group.bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.bytes = offset
        descriptor = shared_block.share(offset, rank, exchange, field="gpus_per_node")
        self._map = mmap.mmap(descriptor, offset)
        os.close(descriptor)
        _make_pages(self._map, rank, size, exchange, progress)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pids = exchange(os.getpid())
        self._failure: BaseException | None = None
        self._closing, self._pinned = threading.Lock(), False
        self.copies: dict[int, torch.Tensor] = {}
        for group in hosted:
            self.copies[group.index] = torch.frombuffer(
                self._map, dtype=group.whole.dtype, count=group.whole.numel(), offset=offsets[group.index]
            )
        self._make_flags(0)

    def _make_flags(self, offset: int) -> None:
        """``offset``: of the device's addresses."""
        memory, ranks = open_flags(self._map, self._rows, self.size), range(self.size)
        self.flags: dict[tuple[int, int], Sequence[Flag]] = {}
        for index, number in self._number.items():
            kind = HostFlag if index in self._by_thread else DeviceFlag
            self.flags[index, COPY] = [kind(memory, 2 * number, rank, offset) for rank in ranks]
            self.flags[index, DRIVE] = [HostFlag(memory, 2 * number + 1, rank, offset) for rank in ranks]
        self.reads_done = [DeviceFlag(memory, self._rows - 1, rank, offset) for rank in ranks]

    def pin(self) -> None:
        """Page-lock the whole block as one region, until :meth:`close`. Raises InputError: the driver refuses."""
        self._device.pin(self.memory)
        self._pinned = True
        self._make_flags(self._device.address_offset(self.memory))

    @property
    def indices(self) -> Iterable[int]:
        """Of its groups."""
        return self._number

    @property
    def own_reads_done(self) -> list[DeviceFlag]:
        """This rank's flag of iterations that have ended."""
        return [self.reads_done[self.rank]]

    def flags_of(self, group: Group, where: int = COPY) -> Sequence[Flag]:
        """Of every rank's shard of ``group``."""
        return self.flags[group.index, where]

    def own_flag(self, group: Group, where: int = COPY) -> Flag:
        """Of this rank's shard of ``group``."""
        return self.flags[group.index, where][self.rank]

    def copy_of(self, group: Group) -> torch.Tensor:
        """The host copy of ``group``."""
        return self.copies[group.index]

    def slice_of(self, group: Group, dp_rank: int) -> torch.Tensor:
        """Part of the host copy that holds the shard of data-parallel rank ``dp_rank``."""
        numel = group.shard.numel()
        return self.copies[group.index].narrow(0, dp_rank * numel, numel)

    def by_thread(self, group: Group) -> bool:
        """Whether threads write the host copy of ``group``."""
        return group.index in self._by_thread

    def publishes(self, group: Group) -> bool:
        """Whether ``group`` is one of those that have flags."""
        return group.index in self._number

    def published(self, group: Group, where: int = COPY) -> list[int]:
        """Version at which each rank's shard of ``group`` is there, or :data:`FAILED`."""
        return [flag.load() for flag in self.flags[group.index, where]]

    def is_published(self, group: Group, version: int, where: int = COPY) -> bool:
        """Whether every shard of ``group`` is there at ``version``. Raises as :meth:`check`, where this rank failed."""
        if self._failure is not None:
            raise self._failure
        return all(flag.reached(version) for flag in self.flags[group.index, where])

    def fail(self, error: BaseException) -> None:
        """Mark this rank as unable to publish: waiting for it raises ``error`` here, PeerLost on other ranks."""
        self._failure = error
        for flags in self.flags.values():
            flags[self.rank].store(FAILED)

    def check_published(self, group: Group, version: int, where: int = COPY) -> None:
        """Raise PeerLost where a rank that has not published ``version`` of ``group`` never will."""
        self._check(self.flags[group.index, where], version, f"to publish group {group.index}")

    def check_reads_done(self, iterations: int) -> None:
        """Raise PeerLost where a rank that has not ended ``iterations`` never will."""
        self._check(self.reads_done, iterations, "to finish reading")

    def check_peers(self, version: int) -> None:
        """:meth:`check_published` of every group. Called by the watch, because a stream waits for a flag without end,
        and by the issuing thread while it waits. What fails on this rank they hear from the thread that fails."""
        with self._closing:
            for index, where in self._awaited if self.flags and self._failure is None else ():
                self._check(self.flags[index, where], version, f"to publish group {index}")

    def _check(self, flags: Sequence[Flag], value: int, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        for rank, flag in enumerate(flags):
            if flag.load() >= value:
                continue
            if any(own[rank].load() == FAILED for own in self.flags.values()):
                raise PeerLost(
                    f"data-parallel rank {rank} of this node (process {self.pids[rank]}) could not publish; "
                    "its own error says why"
                )
            if not _alive(self.pids[rank]) and flag.load() < value:
                raise PeerLost(
                    f"data-parallel rank {rank} of this node (process {self.pids[rank]}) ended while others "
                    f"waited for it {what}"
                )

    def close(self) -> None:
        """Unmap the block. It disappears with its last rank."""
        if self._pinned:
            self._device.unpin(self.memory)
        self.copies.clear()
        with self._closing:
            self.flags, self.reads_done = {}, []
            del self.memory
        with contextlib.suppress(BufferError):  # a view still lives; the mapping ends with the process
            self._map.close()


def _make_pages(block: mmap.mmap, rank: int, size: int, exchange, progress) -> None:
    """All ranks make the pages of the block together, or all fail alike."""
    block_pages.spread(block)
    exchange(None)  # a page that is made before the policy is set stays where it is
    failed = None
    try:
        block_pages.make(block, rank, size, progress)
    except OSError as error:
        failed = error.strerror
    failures = [text for text in exchange(failed) if text is not None]
    if failures:
        raise InputError(failures[0], field="host memory", value=len(block))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
