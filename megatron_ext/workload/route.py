"""The routes by which a whole group can reach the device."""

from typing import Literal

Route = Literal["gpu", "cpu", "cpu_shard", "nvme"]

ROUTES: tuple[Route, ...] = ("gpu", "cpu", "cpu_shard", "nvme")
"""``cpu_shard``: the own shard from host memory, then an all-gather."""

PIECE_BYTES, MOST_PIECES = 16 << 20, 8


def shard_pieces(size_bytes: int) -> int:
    """Pieces in which ``cpu_shard`` brings a group of ``size_bytes``: one is gathered while the next is copied.

    A piece has at least :data:`PIECE_BYTES` of the whole group, so that bytes and not calls set the time.
    """
    return min(max(size_bytes // PIECE_BYTES, 1), MOST_PIECES)


def piece_buffer_bytes(size_bytes: int) -> int:
    """Bytes of the buffer in which a piece is gathered, before its parts go to their places; 0 for a single piece."""
    pieces = shard_pieces(size_bytes)
    return -(-size_bytes // pieces) if pieces > 1 else 0


Algorithm = Literal["hierarchical", "symmetric"]
"""How a schedule can ask route ``gpu`` to gather: between nodes first and inside them after; or by copy engines, in
memory that the ranks of a node have registered with each other. Other names that a cost table compares are the process
group's own affair."""

HIERARCHICAL: Algorithm = "hierarchical"
SYMMETRIC: Algorithm = "symmetric"
