"""Bytes that the states of parameters take on a drive, and slots through which they and gradients pass."""

from megatron_ext.workload.drive_reads import SECTOR_BYTES

LINE_BYTES = 64
"""A cache line, where vector instructions like tensors to begin."""

ITEM_BYTES = 4
"""States are fp32."""

GRADIENT_SLOTS = 2
"""Of a rank whose gradients are added up in host memory: one is filled while the other is added."""

ROUNDING_BYTES = 1 << 24
"""Of the buffer on the device in which parameters are rounded for shards in host memory; less for smaller ones. At 50
GB/s a copy of it takes 300 us, 20 times what issuing it takes."""


def tensor_bytes(numel: int) -> int:
    """Bytes between the beginnings of two tensors of one parameter."""
    return -(-ITEM_BYTES * numel // LINE_BYTES) * LINE_BYTES


def region_bytes(numel: int, moments: int) -> int:
    """One parameter of ``numel`` elements with its moments, up to the drive's next sector."""
    return -(-tensor_bytes(numel) * (1 + moments) // SECTOR_BYTES) * SECTOR_BYTES


def gradient_slot_bytes(slot_bytes: int, moments: int) -> int:
    """Room next to a slot of ``slot_bytes`` for the gradients, fp32, of the parameters in it."""
    return -(-slot_bytes // (1 + moments) // SECTOR_BYTES) * SECTOR_BYTES
