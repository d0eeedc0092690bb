"""The node's host copy: one block of memory that the data-parallel ranks of a node share.

[Note: Versions in shared memory]
A rank publishes its shard (and, where there are several nodes, those it has received from its
counterparts on the others) by copying it and then storing the parameters' version into a flag
of its own (one cache line each). A reader polls the flags of all shards before it copies.
Before a rank overwrites what iteration n read, it waits until every rank of the node has stored
n into its ``reads_done`` flag, so nobody reads a mixture. (Iterations are counted, not versions:
after a skipped optimizer step one version is read by two iterations.) What orders a flag behind the data that it
announces is in shared_flags.py.

[Note: Reads that are queued]
On CUDA ``reads_done`` is stored by the compute stream, behind its waits for the copies, and waited for by the
publisher's stream, see stream_flags.py. Where threads wait for flags a rank stores it when it has issued its copies,
which may still be queued. That is enough: another rank writes behind its optimizer step on its device, which comes
behind its reduce-scatters, and these need this rank's backward, which is queued behind the copies. Where parameters
change without an optimizer step (``params_changed``) no reduce-scatter lies between, so a rank then waits for its
device before it stores the flag.
"""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import block_pages, shared_block
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.shared_flags import flags_bytes, open_flags
from megatron_ext.runtime.worker import Exiting, exiting

LOOK_SECONDS = 0.1
"""Seconds between two checks, while a rank waits for others, that these are still alive."""

SPINS = 200
"""Polls that only yield the processor; a reader that waits longer sleeps between polls."""


FAILED = -1
"""Value of the flags of a rank that cannot publish any more."""


class PeerLost(RuntimeError):
    """A rank of this node is gone, or cannot publish, while others wait for it."""


class HostPool:
    """Host copies and flags of published groups, mapped into this rank.

    Args:
        groups: published groups, the same list on every rank of the pool.
        copied: indices of those that have a host copy; the others have only flags.
        rank: this rank's index in the pool (among the data-parallel ranks on the node).
        size: number of ranks in the pool.
        exchange: collective ``exchange(object) -> list`` over exactly the pool's ranks.
        progress: called with the bytes of this rank's pages that are allocated, and the bytes of all of them.

    Attributes:
        memory: the whole block as uint8, flags included; page-locked as one region.

    Raises:
        InputError: another rank's block cannot be opened, there is no memory for it, or this machine cannot order
            stores (see shared_flags.py).
    """

    def __init__(
        self,
        groups: list[Group],
        copied: set[int],
        rank: int,
        size: int,
        exchange,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.rank, self.size = rank, size
        self._row_of = {group.index: n for n, group in enumerate(groups)}
        self.reads_row = len(groups)  # behind the published groups' rows
        offset = -(-flags_bytes(len(groups) + 1, size) // mmap.PAGESIZE) * mmap.PAGESIZE
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
        self.flags = open_flags(self._map, len(groups) + 1, size)
        self._device: Any = None
        self._closing = threading.Lock()
        self._words: list[list[int]] = []  # the device's addresses of the flags, by row and rank
        self._failure: BaseException | None = None
        self.copies: dict[int, torch.Tensor] = {}
        for group in hosted:
            data = torch.frombuffer(
                self._map, dtype=group.whole.dtype, count=group.whole.numel(), offset=offsets[group.index]
            )
            self.copies[group.index] = data

    def pin(self, device) -> None:
        """Page-lock the whole block as one region, until :meth:`close`. Raises RuntimeError: the driver refuses."""
        device.pin(self.memory)
        self._device = device
        if device.flags is not None:
            offset = device.flags.offset(self.memory)
            rows, ranks = range(self.reads_row + 1), range(self.size)
            self._words = [[self.flags.address(row, rank) + offset for rank in ranks] for row in rows]

    def slice_of(self, group: Group, dp_rank: int) -> torch.Tensor:
        """Part of the host copy that holds the shard of data-parallel rank ``dp_rank``."""
        numel = group.shard.numel()
        return self.copies[group.index].narrow(0, dp_rank * numel, numel)

    # ``stream``: what stores the flag or waits for it, in its order; None: the calling thread, now.

    def set_published(self, group: Group, version: int, stream=None) -> None:
        """Tell the other ranks that this rank's shard of ``group`` is there at ``version``."""
        self._store(self._row_of[group.index], version, stream)

    def fail(self, error: BaseException) -> None:
        """Mark this rank as unable to publish: waiting for it raises ``error`` here, PeerLost on other ranks."""
        self._failure = error
        for row in range(self.reads_row):
            self.flags.store(row, self.rank, FAILED)

    def publishes(self, group: Group) -> bool:
        """Whether ``group`` is one of those that have flags."""
        return group.index in self._row_of

    def published(self, group: Group) -> np.ndarray:
        """Version at which each rank's shard of ``group`` is there, or :data:`FAILED`; shape ``(size,)``."""
        return self.flags.load(self._row_of[group.index])

    def wait_published(self, group: Group, version: int, stream=None) -> None:
        """Wait until every shard of ``group`` is there at ``version``.

        Raises:
            PeerLost: a rank ended before it published, or failed to; for a stream see :meth:`check_peers`.
        """
        self._wait(self._row_of[group.index], version, stream)

    def wait_own(self, group: Group, version: int, stream) -> None:
        """Let ``stream`` wait until this rank's shard of ``group`` is there at ``version``."""
        self._device.flags.wait(stream, self._words[self._row_of[group.index]][self.rank], version)

    def set_reads_done(self, iterations: int, stream=None) -> None:
        """Tell the other ranks that this rank has ended ``iterations`` and reads them no more."""
        self._store(self.reads_row, iterations, stream)

    def wait_reads_done(self, iterations: int, stream=None) -> None:
        """Wait until every rank has ended ``iterations`` iterations. Raises as :meth:`wait_published`."""
        self._wait(self.reads_row, iterations, stream)

    def check_peers(self, version: int) -> None:
        """Raise PeerLost where a rank that has not published ``version`` of every group never will. Called by the
        watch, because a stream waits for a flag without end."""
        with self._closing:
            for row in range(self.reads_row if hasattr(self, "flags") else 0):
                self._check_peers(row, version)

    def _store(self, row: int, value: int, stream) -> None:
        if stream is None:
            self.flags.store(row, self.rank, value)
        else:
            self._device.flags.store(stream, self._words[row][self.rank], value)

    def _wait(self, row: int, value: int, stream) -> None:
        if stream is None:
            self.poll(row, value)
        else:
            wait = self._device.flags.wait
            for word in self._words[row]:
                wait(stream, word, value)

    def poll(self, row: int, value: int) -> None:
        def ready() -> bool:
            return bool((self.flags.load(row) >= value).all())

        for _ in range(SPINS):
            if ready():
                return
            os.sched_yield()
        checked = time.monotonic()
        while not ready():
            time.sleep(20e-6)
            if self._failure is not None:
                raise self._failure
            if exiting():
                raise Exiting(f"the process ended while it waited for others {self._what(row)}")
            if time.monotonic() - checked > LOOK_SECONDS:
                checked = time.monotonic()
                self._check_peers(row, value)

    def _check_peers(self, row: int, value: int) -> None:
        for rank in np.flatnonzero(self.flags.load(row) < value):
            if any(self.flags.load(group)[rank] == FAILED for group in range(self.reads_row)):
                raise PeerLost(
                    f"data-parallel rank {rank} of this node (process {self.pids[rank]}) could not publish; "
                    "its own error says why"
                )
            if not _alive(self.pids[rank]) and self.flags.load(row)[rank] < value:
                raise PeerLost(
                    f"data-parallel rank {rank} of this node (process {self.pids[rank]}) ended while others "
                    f"waited for it {self._what(row)}"
                )

    def _what(self, row: int) -> str:
        index = next((index for index, own in self._row_of.items() if own == row), None)
        return "to finish reading" if index is None else f"to publish group {index}"

    def close(self) -> None:
        """Unmap the block. It disappears with its last rank."""
        if self._device is not None:
            self._device.unpin(self.memory)
        self.copies.clear()
        with self._closing:
            del self.flags, self.memory
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
