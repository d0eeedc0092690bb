"""Bytes that optimizer states take on a drive, and sizes of the slots through which states and gradients pass."""

from megatron_ext.workload.drive_reads import SECTOR_BYTES

LINE_BYTES = 64
"""Size of a cache line. Vector instructions are fastest on tensors that begin at one."""

ITEM_BYTES = 4
"""States are fp32."""

GRADIENT_SLOTS = 2
"""Slots of a rank whose gradients are added up in host memory: one is filled while the other is added."""

ROUNDING_BYTES = 1 << 24
"""Bytes of the device buffer in which parameters are rounded for shards in host memory; smaller shards have a smaller
one. At 50 GB/s a copy of the buffer takes 300 us, 20 times the time to issue it."""


def tensor_bytes(numel: int) -> int:
    """Bytes from the start of one tensor of a parameter to the start of the next."""
    return -(-ITEM_BYTES * numel // LINE_BYTES) * LINE_BYTES


def region_bytes(numel: int, moments: int) -> int:
    """Bytes of one parameter of ``numel`` elements with its moments, rounded up to the drive's sectors."""
    return -(-tensor_bytes(numel) * (1 + moments) // SECTOR_BYTES) * SECTOR_BYTES


def gradient_slot_bytes(slot_bytes: int, moments: int) -> int:
    """Bytes next to a slot of ``slot_bytes`` for the fp32 gradients of the parameters in the slot."""
    return -(-slot_bytes // (1 + moments) // SECTOR_BYTES) * SECTOR_BYTES
