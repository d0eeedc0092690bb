"""The node's host copies: blocks of memory that the ranks of a node share.

[Note: Versions in shared memory]
A rank publishes its shard by copying it and then storing the parameters' version into its flag. With several nodes, it
also publishes the shards that it has received from its counterparts on the other nodes. A reader waits for the flags of
all shards before it copies. If a stream copies the shard, a stream stores the flag. If a thread copies it (from the
host's optimizer, from another node, to the drive), the thread stores the flag. A group's copy on the drive has separate
flags. Before a rank overwrites what iteration n read, it waits until every rank of the node has stored n into its
``reads_done`` flag, so no rank reads a mixture. (Iterations are counted, not versions: after a skipped optimizer step
one version is read by two iterations.) ``reads_done`` is stored by the compute stream, behind its waits for the copies.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import block_pages, shared_block
from megatron_ext.runtime.flags import DeviceFlag, Flag, HostFlag, flags_bytes, open_flags
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.page_locked import pin, unlock_unused

FAILED = -1
"""Value of the flags of a rank that can no longer publish."""

COPY, DRIVE = 0, 1
"""Rows of flags of each published group: for its host copy, and for its copy on the drive."""


class PeerLost(RuntimeError):
    """A rank of this node has ended, or cannot publish, while others wait for it."""


class Sharers(NamedTuple):
    """Ranks of this node that share the copies of ``groups``. Experts are shared by other ranks than all else.

    Attributes:
        groups: the same list on each of these ranks.
        rank: index of this rank among them.
        size: number of ranks.
        exchange: the collective ``exchange(object) -> list`` over exactly these ranks.
    """

    groups: list[RankGroup]
    rank: int
    size: int
    exchange: Callable[[object], list]


class _Block:
    """Host copies and flags that the same ranks share, mapped into this rank.

    Attributes:
        map, memory: all of it, flags included, and as uint8; page-locked as one region.
        copies: host copies by group index, 1D.
        pids: process ids of its ranks.
    """

    def __init__(self, sharers: Sharers, copied: set[int], by_thread: Collection[int], progress: block_pages.Progress):
        self.sharers, rows = sharers, 2 * len(sharers.groups) + 1
        rank, size, exchange = sharers[1:]
        hosted = [group for group in sharers.groups if group.index in copied]
        sizes = [flags_bytes(rows, size), *(group.bytes for group in hosted)]
        starts = [*accumulate((-(-part // mmap.PAGESIZE) * mmap.PAGESIZE for part in sizes), initial=0)]
        descriptor = shared_block.share(starts[-1], rank, exchange, field="gpus_per_node")
        self.map = shared_block.mapped(descriptor, starts[-1])
        _make_pages(self.map, rank, size, exchange, progress)
        self.memory = torch.frombuffer(self.map, dtype=torch.uint8)
        self.pids = exchange(os.getpid())
        self.copies = {
            group.index: torch.frombuffer(self.map, dtype=group.whole.dtype, count=group.whole.numel(), offset=start)
            for group, start in zip(hosted, starts[1:])
        }
        words, ranks = open_flags(self.map, rows, size), range(size)
        self.flags: dict[tuple[int, int], Sequence[Flag]] = {}
        for number, group in enumerate(sharers.groups):
            kind = HostFlag if group.index in by_thread else DeviceFlag
            self.flags[group.index, COPY] = [kind(words, 2 * number, rank) for rank in ranks]
            self.flags[group.index, DRIVE] = [HostFlag(words, 2 * number + 1, rank) for rank in ranks]
        self.reads_done = [DeviceFlag(words, rows - 1, rank) for rank in ranks]

    def check(self, flags: Sequence[Flag], value: int, what: str) -> None:
        """Raise PeerLost if a rank whose flag has not reached ``value`` will never store it."""
        for rank, flag in enumerate(flags):
            if flag.load() >= value:
                continue
            who = f"data-parallel rank {rank} of this node (process {self.pids[rank]})"
            if any(own[rank].load() == FAILED for own in self.flags.values()):
                raise PeerLost(f"{who} could not publish; see its own error")
            if not _alive(self.pids[rank]) and flag.load() < value:
                raise PeerLost(f"{who} ended while others waited for it {what}")

    def close(self) -> None:
        """Unmap the block. Its memory is freed with its last rank."""
        self.copies, self.flags, self.reads_done = {}, {}, []
        del self.memory
        with contextlib.suppress(BufferError):  # a view still lives; the mapping ends with the process
            self.map.close()


class HostPool:
    """Host copies and flags of this rank's published groups.

    Args:
        sharers: which ranks share which groups.
        copied: indices of groups that have a host copy; the others have only flags.
        by_thread: indices of the groups whose host copy is written by threads.
        device: page-locks the blocks, see :meth:`pin`.
        progress: told of this rank's part of each block.
        on_drive: indices of the groups that have a copy on the drive.

    Attributes:
        blocks: blocks of memory, one for each of the ``sharers``.
        copies: host copies by group index, 1D.
        flags: the flags of every rank's shard, by group index and :data:`COPY` or :data:`DRIVE`.
        reads_done: flags of iterations that have ended, of every rank of every block.
        own_reads_done: those of them that belong to this rank.

    Raises:
        InputError: another rank's block cannot be opened, there is no memory for it, or this machine cannot order
            stores (see flags.py). All blocks have been tried then: ranks that share another block may not have failed.
    """

    def __init__(
        self,
        sharers: Sequence[Sharers],
        copied: set[int],
        by_thread: set[int],
        device,
        progress: block_pages.Progress = block_pages.silent,
        on_drive: Collection[int] = (),
    ):
        self._device, self._by_thread = device, by_thread
        self._awaited = [(index, COPY) for index in copied] + [(index, DRIVE) for index in on_drive]
        self._failure: BaseException | None = None
        self._closing, self._unpin = threading.Lock(), []
        self.blocks: list[_Block] = []
        errors = []
        for own in sharers:
            try:
                self.blocks.append(_Block(own, copied, by_thread, progress))
            except InputError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._block_of = {group.index: block for block in self.blocks for group in block.sharers.groups}
        self.copies = {index: copy for block in self.blocks for index, copy in block.copies.items()}
        self.flags = {key: flags for block in self.blocks for key, flags in block.flags.items()}
        self.reads_done = [flag for block in self.blocks for flag in block.reads_done]
        self.own_reads_done = [block.reads_done[block.sharers.rank] for block in self.blocks]

    def pin(self) -> None:
        """Page-lock every block as one region, until :meth:`close`. Raises InputError if the driver refuses."""
        for block in self.blocks:
            self._unpin.append(pin(block.memory, block.map, self._device))
            offset = self._device.address_offset(block.memory)
            for flag in (*block.reads_done, *(flag for flags in block.flags.values() for flag in flags)):
                flag.device_address += offset

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.memory.numel() for block in self.blocks)

    @property
    def own_bytes(self) -> int:
        """This rank's part of the host copies."""
        return sum(copy.nbytes // self._block_of[index].sharers.size for index, copy in self.copies.items())

    def own_flag(self, group: RankGroup, where: int = COPY) -> Flag:
        """The flag of this rank's shard of ``group``."""
        return self.flags[group.index, where][self._block_of[group.index].sharers.rank]

    def slice_of(self, group: RankGroup, dp_rank: int) -> torch.Tensor:
        """Part of the host copy that holds the shard of data-parallel rank ``dp_rank``."""
        numel = group.shard.numel()
        return self.copies[group.index].narrow(0, dp_rank * numel, numel)

    def by_thread(self, group: RankGroup) -> bool:
        """Whether threads write the host copy of ``group``."""
        return group.index in self._by_thread

    def published(self, group: RankGroup, where: int = COPY) -> list[int]:
        """The version of ``group`` that each rank has published of its shard, or :data:`FAILED`."""
        return [flag.load() for flag in self.flags[group.index, where]]

    def is_published(self, group: RankGroup, version: int, where: int = COPY) -> bool:
        """Whether every shard of ``group`` is published at ``version``. Raises this rank's failure, if any."""
        self._raise_failure()
        return all(flag.reached(version) for flag in self.flags[group.index, where])

    def fail(self, error: BaseException) -> None:
        """Mark this rank as unable to publish: waits for it raise ``error`` on this rank, PeerLost on other ranks."""
        self._failure = error
        for (index, _), flags in self.flags.items():
            flags[self._block_of[index].sharers.rank].store(FAILED)

    def check_published(self, group: RankGroup, version: int, where: int = COPY) -> None:
        """Raise PeerLost if a rank that has not published ``version`` of ``group`` never will."""
        self._raise_failure()
        self._check(group.index, where, version)

    def check_reads_done(self, iterations: int) -> None:
        """Raise PeerLost if a rank that has not ended ``iterations`` iterations never will."""
        self._raise_failure()
        for block in self.blocks:
            block.check(block.reads_done, iterations, "to finish reading")

    def check_peers(self, version: int) -> None:
        """:meth:`check_published` of every group. The watch calls it, because a stream waits for a flag without a time
        limit; the issuing thread calls it while it waits. A failure on this rank is raised by the thread that fails."""
        with self._closing:
            for index, where in self._awaited if self.flags and self._failure is None else ():
                self._check(index, where, version)

    def _check(self, index: int, where: int, version: int) -> None:
        self._block_of[index].check(self.flags[index, where], version, f"to publish group {index}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Unmap the blocks. Their memory is freed with their last ranks."""
        for unpin in self._unpin:
            unpin()
        unlock_unused(self._device)
        self.copies.clear()
        with self._closing:
            self.flags, self.reads_done, self.own_reads_done = {}, [], []
            for block in self.blocks:
                block.close()


def _make_pages(block: mmap.mmap, rank: int, size: int, exchange, progress) -> None:
    """All ranks make the pages of the block together; if one fails, all fail."""
    block_pages.spread(block)
    exchange(None)  # a page that is made before the policy is set would stay where it is
    failed = None
    try:
        block_pages.make_pages(block, rank, size, progress)
    except OSError as error:
        failed = error.strerror
    if (failure := shared_block.agreed_failure(failed, exchange)) is not None:
        raise InputError(failure, field="host memory", value=len(block))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
