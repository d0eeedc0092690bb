"""Measures route ``nvme``: from the drive into a pinned slot, and from there to the device.

Block size and queue depth are swept once. The best pair is used for the whole curve and stored in
its ``settings`` as ``block_bytes`` and ``queue_depth``, the names that are read at run time.
"""

import mmap
from statistics import median

import torch

from megatron_ext.formats.checks import MOST_BYTES
from megatron_ext.measure.drive_file import open_filled
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operation import Operation
from megatron_ext.measure.options import KIB, MIB
from megatron_ext.measure.sampling import sample
from megatron_ext.runtime.drive import BLOCK, MEMORY_FILESYSTEMS, aligned, filesystem
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.routes.stream_route import StreamRoute
from megatron_ext.runtime.streams import Arrival
from megatron_ext.runtime.worker import Transfer, Waitable, Worker

BLOCK_BYTES = (256 * KIB, MIB, 4 * MIB)
QUEUE_DEPTHS = (1, 4, 16)

ABOUT_AS_FAST = 1.05

SWEEP_BYTES = 32 * MIB
"""Size that the sweep reads: large enough for every combination to fill its queue."""


class NvmeRead(Operation):
    """The whole way of one group: drive, pinned slot, device. All ranks read at once, each from its own file."""

    name = "nvme"
    by_host = True
    to_device = True
    most_bytes = MOST_BYTES
    """Limit of the file and of the slot."""

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.size_bytes = aligned(min(fabric.arena_bytes, self.most_bytes))
        assert fabric.options.nvme_path is not None
        self.drive = open_filled(fabric.options.nvme_path, self.size_bytes, block_bytes=MIB, queue_depth=4)
        self._slot = mmap.mmap(-1, self.size_bytes)
        self.slot = memoryview(self._slot)
        self.staged = torch.frombuffer(self._slot, dtype=torch.float32)
        fabric.device.pin(self.staged)
        self.worker, self.issuer = Worker("measure-nvme"), Issuer()
        self.route = StreamRoute("measure-nvme-copies", fabric.device)
        self.memory = fabric.busy_arena() if busy else fabric.arena

    def offset(self, size_bytes: int, round_index: int) -> int:
        """A different place in the file in every round, because drives have caches."""
        return round_index % (self.size_bytes // aligned(size_bytes)) * aligned(size_bytes)

    def issue(self, size_bytes: int, round_index: int) -> Waitable:
        offset = self.offset(size_bytes, round_index)
        target = self.fabric.window(self.memory, size_bytes, round_index)
        slot = self.slot[: aligned(size_bytes)]
        staged = self.worker.submit(lambda transfer: self.drive.read(slot, offset, self.name))
        if not self.to_device:
            return staged
        arrival = Arrival(self.fabric.device, self.issuer).begin()

        def copy() -> None:
            staged.wait()
            self.route.copy(target, self.staged[: size_bytes // 4], arrival)

        self.issuer.when(lambda: staged.ended, copy)
        return arrival

    def close(self) -> None:
        self.worker.close()
        self.route.close()
        self.drive.close()
        self.fabric.device.unpin(self.staged.data_ptr())


class NvmeStage(NvmeRead):
    """Only the read into the slot, for contention. The copy from the slot is a copy of link ``cpu``, which has its own
    rows of contention. Its file is a few times as large as a transfer, because filling one for the largest group may
    take longer than all of contention."""

    to_device = False
    most_bytes = 256 * MIB


class NvmeWrite(Operation):
    """Every rank writes its shard of the group to the drive and waits until the drive has it, as the run does. It uses
    the file of ``read``."""

    name = "publish_nvme"
    by_host = True

    def __init__(self, read: NvmeRead):
        super().__init__(read.fabric)
        self.read = read

    def issue(self, size_bytes: int, round_index: int) -> Transfer:
        shard = max(size_bytes // self.fabric.options.data_parallel_size, BLOCK)
        drive, offset = self.read.drive, self.read.offset(shard, round_index)

        def write(transfer: Transfer) -> None:
            drive.write(self.read.slot[:shard], offset, self.name)
            drive.flush(offset, aligned(shard), self.name)

        return self.read.worker.submit(write)


def sweep(fabric: Fabric, operation: NvmeRead, seconds: float) -> dict:
    """Set the best block size and queue depth on ``operation``. Returns the settings for the table.

    All ranks take part and use the same pair: the one with the least median over all ranks.
    """
    size = fabric.options.rounded(min(SWEEP_BYTES, fabric.options.largest))
    combinations = [
        (block, depth) for depth in QUEUE_DEPTHS for block in BLOCK_BYTES if block <= size or block == BLOCK_BYTES[0]
    ]
    own = []
    for block, depth in combinations:
        operation.drive.configure(block, depth)
        own.append(sample(fabric, operation, size, seconds / len(combinations)).us)
    everyone = gather_objects(own)
    medians = [median(us for theirs in everyone for us in theirs[index]) for index in range(len(combinations))]
    block, depth = best_settings(combinations, medians)
    operation.drive.configure(block, depth)
    kind = filesystem(fabric.options.nvme_path)
    return {"settings": {"block_bytes": block, "queue_depth": depth}, "notes": _notes(kind, operation.drive.direct)}


def best_settings(combinations: list[tuple[int, int]], medians: list[float]) -> tuple[int, int]:
    """The (block size, queue depth) with the least median. Among pairs that are about as fast, it is the deepest queue
    of the largest blocks, because in training that keeps the drive busy while no thread has a processor."""
    limit = min(medians) * ABOUT_AS_FAST
    return max((one for one, us in zip(combinations, medians) if us <= limit), key=lambda one: (one[1], one[0]))


def _notes(kind: str, direct: bool) -> list[str]:
    if kind in MEMORY_FILESYSTEMS:
        return [f"nvme: the path is on {kind}: memory was measured, not a drive"]
    if not direct:
        return [f"nvme: {kind} does not support O_DIRECT: the page cache was not bypassed, but dropped between reads"]
    return []
