"""Slots in host memory through which pieces of a file on a drive pass to the host's optimizer and back."""

from collections import deque
from time import perf_counter_ns

import torch

from megatron_ext.runtime import block_pages
from megatron_ext.runtime.drive import DriveFile
from megatron_ext.runtime.recorder import NOTHING
from megatron_ext.runtime.worker import LATER, Transfer, Worker


class DriveSlots:
    """Slots that are read into, used, and then written out or released.

    Args:
        file: the file that is read and written.
        count: number of slots.
        piece_bytes: room for a piece of the file in each slot, a multiple of the drive's block.
        recorder: where reads and writes are recorded.

    Attributes:
        pieces: 1D uint8 tensors by slot.
        free: released slots, in the order of release. The last write out of a slot may still be running.
        bytes: size of all slots.
    """

    def __init__(self, file: DriveFile, count: int, piece_bytes: int, recorder=NOTHING):
        self.bytes = count * piece_bytes
        self._map = block_pages.private(self.bytes)
        self._memory, self._piece_bytes = memoryview(self._map), piece_bytes
        self._everything = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pieces = list(self._everything.split(piece_bytes))
        self.free = deque(range(count))
        self._file, self._recorder = file, recorder
        self._writes: list[Transfer | None] = [None] * count  # the last write out of each slot
        self._worker = Worker("states-read")

    def read(self, slot: int, place: int, size_bytes: int, what: str, after: Transfer | None) -> Transfer:
        """Begin to read the bytes at ``place``, after ``after`` and after the last write out of the slot."""
        before = self._writes[slot], after
        self._recorder.moved("states", "drive_read", size_bytes)

        def read(transfer: Transfer):
            for write in before:
                if write is not None:
                    write.wait()
            recorded = self._recorded("states read")
            self._file.start(self._piece(slot, size_bytes), place, what, transfer, recorded)
            return LATER

        return self._worker.submit(read)

    def write(self, slot: int, place: int, size_bytes: int, what: str) -> Transfer:
        """Begin to write the slot to ``place``."""
        self._writes[slot] = transfer = Transfer()
        self._recorder.moved("states", "drive_write", size_bytes)
        recorded = self._recorded("states write")
        self._file.start(self._piece(slot, size_bytes), place, what, transfer, recorded, write=True)
        return transfer

    def wait_for_write(self, slot: int) -> None:
        """Wait for the last write out of the slot."""
        transfer = self._writes[slot]
        if transfer is not None:
            transfer.wait()

    def _piece(self, slot: int, size_bytes: int) -> memoryview:
        return self._memory[slot * self._piece_bytes : slot * self._piece_bytes + size_bytes]

    def _recorded(self, name: str):
        begin = perf_counter_ns()
        return lambda: self._recorder.add("nvme", name, begin, perf_counter_ns())

    def close(self) -> None:
        """Wait until all reads and writes have ended, and free the memory."""
        self._worker.close()
        self._file.end_transfers()
        del self.pieces, self._everything, self._memory, self._map
