"""Pages of a shared block: made before the first step, by all ranks at once, spread over the machine's memory.

[Note: Where pages lie]
Without a policy a page lies in the memory of the processor socket that touches it first. A host copy that all GPUs of a
node read would then load one socket's memory and the link between sockets. So pages are interleaved over the sockets
that this process may use (MPOL_INTERLEAVE, which a shared mapping keeps for every process that maps it), on machines
that have several. Pages in the memory of the rank that writes them would make writes local, but the node's ranks read
as many times more bytes, and all of them read a group from its first shard to its last: one socket's memory would
serve all of them, then the other's. Pages are large where the kernel may make them so (``shmem_enabled`` is ``advise``
or more); the doctor says where pages lie and whether they are large.
Both concern speed alone, so a kernel that refuses is not an error.
Sources: mbind(2), madvise(2).
"""

import contextlib
import ctypes
import errno
import mmap
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np

STATUS = Path("/proc/self/status")
PIECE_BYTES = 1 << 30
"""Pages are made in pieces of so many bytes, so that progress can be said."""

MPOL_INTERLEAVE = 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
MADV_POPULATE_WRITE = 23  # Linux 5.14


def memory_nodes() -> list[int]:
    """Numbers of the NUMA nodes whose memory this process may use; empty where the system does not say."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return []
    text = next((line.partition(":")[2].strip() for line in lines if line.startswith("Mems_allowed_list:")), "")
    return [
        node
        for part in text.split(",")
        if part
        for node in range(int(part.partition("-")[0]), int(part.rpartition("-")[2]) + 1)
    ]


def spread(block: mmap.mmap) -> bool:
    """Interleave the pages of ``block`` over all memory nodes, before any is made. Returns whether they will."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # this kernel has none
            block.madvise(mmap.MADV_HUGEPAGE)
    nodes, number = memory_nodes(), _SYS_MBIND.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return False
    mask = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    start = (ctypes.c_char * len(block)).from_buffer(block)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told of.
    bits = ctypes.c_ulong(64 * len(mask) + 1)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(ctypes.addressof(start)),
        ctypes.c_ulong(len(block)),
        ctypes.c_int(MPOL_INTERLEAVE),
        mask,
        bits,
        ctypes.c_uint(0),
    )
    return failed == 0


def make(
    block: mmap.mmap,
    part: int,
    parts: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    region: tuple[int, int] | None = None,
) -> None:
    """Make the pages of one of ``parts`` equal parts of ``block``, which nobody has written to yet.

    Args:
        region: first byte, at a page's begin, and length of what the parts are of; None: the whole block.
        progress: called with the bytes of this part that are allocated, and the bytes of the whole part.

    Raises:
        OSError: there is no memory for them.
    """
    first, length = region or (0, len(block))
    pages = -(-length // mmap.PAGESIZE)
    start, stop = (first + pages * index // parts * mmap.PAGESIZE for index in (part, part + 1))
    for begin in range(start, stop, PIECE_BYTES):
        size = min(PIECE_BYTES, stop - begin)
        try:
            block.madvise(MADV_POPULATE_WRITE, begin, size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, f"{size} bytes of host memory cannot be had: {error.strerror}") from None
            words = np.frombuffer(block, dtype=np.uint8)[begin : begin + size : mmap.PAGESIZE]
            words |= 0  # an older kernel makes a page when it is written to
        progress(begin + size - start, stop - start)
