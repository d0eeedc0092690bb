"""The node's NVMe copies: one nameless file for all groups that the same ranks of a node share."""

import contextlib
import itertools
import mmap
from collections.abc import Sequence

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import block_pages, drive
from megatron_ext.runtime.flags import private_flags
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import Sharers
from megatron_ext.runtime.page_locked import pin, unlock_unused
from megatron_ext.runtime.shared_block import agreed_failure, share_file
from megatron_ext.runtime.worker import Transfer
from megatron_ext.workload.drive_reads import DriveReads


class NvmePool:
    """NVMe copies of groups and this rank's staging slots.

    Args:
        directory: on the drive.
        sharers: which ranks of the node share the copies of which groups.
        slots, slot_bytes: number of staging slots of this rank, and the size of each.
        settings: how to read.
        device: page-locks the slots.

    Attributes:
        place_of: the file that holds a group's copy, and the byte at which it begins, by group index.
        copied_out: flags by slot: number of copies out of the slot that have ended.

    Raises:
        InputError: the drive cannot hold the copies. Raised on every rank of the pool.
    """

    def __init__(
        self, directory, sharers: Sequence[Sharers], *, slots: int, slot_bytes: int, settings: DriveReads, device
    ):
        self.place_of: dict[int, tuple[drive.DriveFile, int]] = {}
        self.files: list[drive.DriveFile] = []
        failed: InputError | None = None
        for own in sharers:
            sizes = [drive.aligned(group.bytes) for group in own.groups]
            try:
                self.files.append(_open_shared(directory, sum(sizes), own, settings))
            except InputError as error:  # other ranks wait for this one to open the remaining files
                failed = error
                continue
            offsets = itertools.accumulate(sizes, initial=0)
            self.place_of |= {group.index: (self.files[-1], offset) for group, offset in zip(own.groups, offsets)}
        if failed is not None:
            self._close_files()
            raise failed
        self.slot_bytes = drive.aligned(slot_bytes)
        self._map = block_pages.private(max(slots * self.slot_bytes, mmap.PAGESIZE))
        self._memory = memoryview(self._map)
        self._slots = torch.frombuffer(self._map, dtype=torch.uint8)
        self._device, self._unpin = device, pin(self._slots, self._map, device)
        self.copied_out = private_flags(slots, device)

    def write(self, group: RankGroup, dp_rank: int, shard: torch.Tensor) -> None:
        """Write one data-parallel rank's shard (host memory). Raises DriveError."""
        size = shard.numel() * shard.element_size()
        file, offset = self.place_of[group.index]
        file.write(shard.detach().view(torch.uint8).numpy(), offset + dp_rank * size, str(group))

    def flush(self, group: RankGroup) -> None:
        """Wait until the writes of ``group`` are on the drive. Raises DriveError."""
        file, offset = self.place_of[group.index]
        file.flush(offset, drive.aligned(group.bytes), str(group))

    def start(self, group: RankGroup, slot: int, transfer: Transfer, before_end=None) -> None:
        """Begin to read the whole group into ``slot``; finishes ``transfer``, see :meth:`DriveFile.start`."""
        start = slot * self.slot_bytes
        memory = self._memory[start : start + drive.aligned(group.bytes)]
        file, offset = self.place_of[group.index]
        file.start(memory, offset, str(group), transfer, before_end)

    def staged(self, group: RankGroup, slot: int) -> torch.Tensor:
        """The flat tensor of ``group`` in ``slot``."""
        start = slot * self.slot_bytes
        return self._slots[start : start + group.bytes].view(group.whole.dtype)

    def _close_files(self) -> None:
        for file in self.files:
            file.close()

    def close(self) -> None:
        """Close the files, which are deleted when the last rank has closed them, and unmap the slots."""
        self._close_files()
        self._unpin()
        unlock_unused(self._device)
        self._memory.release()
        del self._slots  # a view of the mapping
        with contextlib.suppress(BufferError):  # another view is still alive; the mapping ends with the process
            self._map.close()


def _open_shared(directory, size: int, sharers: Sharers, settings: DriveReads) -> drive.DriveFile:
    """The pool's first rank makes the file and all ranks open it. If one fails, all fail."""
    make = lambda: drive.create_file(directory, size)
    descriptor, pid = share_file(make, sharers.rank, sharers.exchange, field="gpus_per_node")
    opened = failed = None
    try:
        opened = drive.open_file(descriptor, pid, directory, settings)
    except (InputError, OSError, RuntimeError) as refused:  # no more files, or threads
        failed = str(refused)
    if (failure := agreed_failure(failed, sharers.exchange)) is not None:
        if opened is not None:
            opened.close()
        raise InputError(failure)
    assert opened is not None  # otherwise ``failure`` was set
    return opened
