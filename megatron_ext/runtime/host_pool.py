"""The node's host copy: one block of memory that the data-parallel ranks of a node share.

[Note: No name to leak]
The block is an anonymous memory file (memfd): it has no name in /dev/shm or anywhere else,
is private to the user (mode 0600), and is gone when its last process is, however that process
ends. Ranks hand it to each other as /proc/<pid>/fd/<fd>, which only the same user may open.
Containers limit the size of /dev/shm; they do not limit this.

[Note: Versions in shared memory]
A rank publishes its shard (and, where there are several nodes, those it has received from its
counterparts on the others) by copying it and then storing the parameters' version into a flag
of its own (one cache line each). A reader polls the flags of all shards before it copies.
Before a rank overwrites what iteration n read, it waits until every rank of the node has stored
n into its ``reads_done`` flag, so nobody reads a mixture. (Iterations are counted, not versions:
after a skipped optimizer step one version is read by two iterations.) Plain stores suffice where stores are seen in
order (x86-64); elsewhere the pool refuses to start.
"""

import mmap
import os
import platform
import time

import numpy as np
import torch

from megatron_ext.errors import InputError
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.worker import Exiting, exiting

LINE = 64
"""Bytes of one flag: a cache line, so that ranks do not disturb each other's flags."""

SPINS = 200
"""Polls that only yield; after these a waiting reader sleeps between polls."""


FAILED = -1
"""Flag of a rank that cannot publish any more."""


class PeerLost(RuntimeError):
    """A rank of this node is gone, or cannot publish, while others wait for it."""


def refuse_weak_memory_order() -> None:
    """Raise InputError on machines whose stores may be seen out of order."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise InputError("host copies need a machine whose stores are seen in order (x86-64)", field="platform", value=platform.machine())


class HostPool:
    """Host copies and flags of published groups, mapped into this rank.

    Args:
        groups: published groups, the same list on every rank of the pool.
        copied: indices of those that have a host copy; the others have only flags.
        rank: this rank's index in the pool (among the data-parallel ranks on the node).
        size: number of ranks in the pool.
        exchange: collective ``exchange(object) -> list`` over exactly the pool's ranks.

    Raises:
        InputError: another rank's block cannot be opened.
    """

    def __init__(self, groups: list[Group], copied: set[int], rank: int, size: int, exchange):
        refuse_weak_memory_order()
        self.rank, self.size = rank, size
        self._line_of = {group.index: n for n, group in enumerate(groups)}
        flags_bytes = LINE * size * (len(groups) + 1)
        offset = -(-flags_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        offsets = {}
        hosted = [group for group in groups if group.index in copied]
        for group in hosted:
            offsets[group.index] = offset
            offset += -(-group.bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.bytes = offset
        self._map = _share_block(offset, rank, exchange)
        self._pids = exchange(os.getpid())
        lines = np.frombuffer(self._map, dtype=np.int64, count=flags_bytes // 8)
        lines = lines.reshape(len(groups) + 1, size, LINE // 8)[:, :, 0]
        self._published, self._reads_done = lines[:-1], lines[-1]
        self._failure: BaseException | None = None
        self.copies: dict[int, torch.Tensor] = {}
        for group in hosted:
            data = torch.frombuffer(self._map, dtype=group.whole.dtype, count=group.whole.numel(), offset=offsets[group.index])
            self.copies[group.index] = data

    def slice_of(self, group: Group, dp_rank: int) -> torch.Tensor:
        """Part of the host copy that holds the shard of data-parallel rank ``dp_rank``."""
        numel = group.shard.numel()
        return self.copies[group.index].narrow(0, dp_rank * numel, numel)

    def set_published(self, group: Group, version: int) -> None:
        """Tell the other ranks that this rank's shard of ``group`` is there at ``version``."""
        self._published[self._line_of[group.index], self.rank] = version

    def fail(self, error: BaseException) -> None:
        """This rank cannot publish any more: whoever waits for it, here or on other ranks, hears of it."""
        self._failure = error
        self._published[:, self.rank] = FAILED

    def wait_published(self, group: Group, version: int) -> None:
        """Block until every shard of ``group`` is there at ``version``.

        Raises:
            PeerLost: a rank ended before it published, or failed to.
        """
        flags = self._published[self._line_of[group.index]]
        self._poll(lambda: bool((flags >= version).all()), lambda: np.flatnonzero(flags < version), f"to publish {group}")

    def set_reads_done(self, iterations: int) -> None:
        """Tell the other ranks that this rank has ended ``iterations`` and reads them no more."""
        self._reads_done[self.rank] = iterations

    def wait_reads_done(self, iterations: int) -> None:
        """Block until every rank has ended ``iterations`` iterations. Raises PeerLost."""
        flags = self._reads_done
        self._poll(lambda: bool((flags >= iterations).all()), lambda: np.flatnonzero(flags < iterations), "to finish reading")

    def _poll(self, ready, late, what: str) -> None:
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
                raise Exiting(f"the process ended while it waited for others {what}")
            if time.monotonic() - checked > 1.0:
                checked = time.monotonic()
                for rank in late():
                    if (self._published[:, rank] == FAILED).any():
                        raise PeerLost(f"data-parallel rank {rank} of this node (process {self._pids[rank]}) could not publish; its own error says why")
                    if not _alive(self._pids[rank]) and not ready():
                        raise PeerLost(f"data-parallel rank {rank} of this node (process {self._pids[rank]}) ended while others waited for it {what}")

    def close(self) -> None:
        """Unmap the block. It disappears with its last rank."""
        self.copies.clear()
        self._published = self._reads_done = None
        try:
            self._map.close()
        except BufferError:
            pass  # a view still lives; the mapping ends with the process


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _share_block(size: int, rank: int, exchange) -> mmap.mmap:
    """Map one zeroed block of ``size`` bytes into every rank of the pool."""
    own = None
    if rank == 0:
        own = os.memfd_create("megatron_ext_host_pool", os.MFD_CLOEXEC)
        os.fchmod(own, 0o600)
        os.ftruncate(own, size)
    pid, handle, identity = exchange((os.getpid(), own, own is not None and _identity(own)))[0]
    descriptor, failed = own, None
    if own is None:
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR)
            if _identity(descriptor) != identity:  # in another process namespace that number is somebody else
                failed = "it is another file"
        except OSError as error:
            failed = error.strerror
    # Nobody closes the descriptor before everybody has opened it, and all fail alike.
    failures = [text for text in exchange(failed) if text is not None]
    if failures:
        if descriptor is not None:
            os.close(descriptor)
        raise InputError(f"the host pool of process {pid} cannot be opened: {failures[0]}; ranks of one node must share a process namespace and a user", field="gpus_per_node")
    block = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return block


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
