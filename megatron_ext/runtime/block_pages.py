"""Pages of host memory. All ranks make them before the first step, with several threads each. They are large where the
system has large pages. The pages of a shared block are spread over the machine's memory.

[Note: Where pages lie]
Without a policy a page lies in the memory of the processor socket that touches it first. A host copy that all GPUs of a
node read would then load one socket's memory and the link between sockets. So on machines with several sockets, pages
are interleaved over the sockets that this process may use (MPOL_INTERLEAVE, which a shared mapping keeps for every
process that maps it). Placing each page near the rank that writes it would make writes local. But the node's ranks
together read many times more bytes than they write, and all of them read a group from its first shard to its last: one
socket's memory would serve all of them, then the other's. Memory of a single process lies where its threads run, see
host_threads.py.

Pages are large where the kernel allows it: for shared memory where ``shmem_enabled`` is ``advise`` or more, for private
memory where ``enabled`` is, which is the case on most systems. So memory that a single process uses is private. In
memory that a device copies to, a forked child finds zeros. Otherwise the kernel would copy a page that is written after
the fork, and the device would write to the old page. In other memory a child sees the values as they were. The doctor
says where pages lie and whether they are large.
All of this concerns speed alone, so a kernel that refuses is not an error.
Sources: mbind(2), madvise(2), the kernel's documentation of transparent huge pages.
"""

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatron_ext.runtime import host_threads
from megatron_ext.runtime.system_files import text_of

STATUS = Path("/proc/self/status")

PIECE_BYTES = 1 << 30
"""Pages are made in pieces of this size, so that progress can be reported."""

LARGE_PAGE_BYTES = 2 << 20
THREAD_BYTES = 8 * LARGE_PAGE_BYTES
"""The part of a piece that one thread makes at a time, so that no two threads make the same large page."""

MPOL_INTERLEAVE = 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_WIPEONFORK = 18  # Linux 4.14
_LIBC = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter's lock, mmap.madvise does not


def memory_nodes() -> list[int]:
    """Numbers of the NUMA nodes whose memory this process may use; empty where the system does not say."""
    lines = (line.partition(":") for line in text_of(STATUS).splitlines())
    return host_threads.numbers(next((said for name, _, said in lines if name == "Mems_allowed_list"), ""))


def private(size: int, *, wiped: bool = True) -> mmap.mmap:
    """``size`` zeroed bytes of this process alone, whose pages are made. ``wiped``: a forked child finds zeros.

    Raises:
        OSError: there is not enough memory.
    """
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        if wiped:
            block.madvise(MADV_WIPEONFORK)
    except OSError:
        block = mmap.mmap(-1, size)  # shared with children, so its pages stay as well
    _advise(block)
    make_pages(block, 0, 1)
    return block


def _advise(block: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # this kernel has no large pages
            block.madvise(mmap.MADV_HUGEPAGE)


def spread(block: mmap.mmap) -> bool:
    """Interleave the pages of ``block`` over all memory nodes, before any is made. Returns whether the kernel will."""
    _advise(block)
    nodes, number = memory_nodes(), _SYS_MBIND.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return False
    mask = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    start = (ctypes.c_char * len(block)).from_buffer(block)
    # The kernel reads one bit less than the count that it is given.
    bits = ctypes.c_ulong(64 * len(mask) + 1)
    where = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_ulong(len(block))
    policy = ctypes.c_int(MPOL_INTERLEAVE), mask, bits, ctypes.c_uint(0)
    return _LIBC.syscall(ctypes.c_long(number), *where, *policy) == 0


Progress = Callable[[int, int], None]
"""Called with the bytes of a part of a block whose pages are made, and all bytes of that part."""


def silent(done: int, total: int) -> None:
    """A :data:`Progress` that reports nothing."""


def make_pages(
    block: mmap.mmap, part: int, parts: int, progress: Progress = silent, region: tuple[int, int] | None = None
) -> None:
    """Make the pages of one of ``parts`` equal parts of ``block``, which has not been written to yet.

    Args:
        region: first byte (at the start of a page) and length of the region that is cut into parts; None: the whole
            block.

    Raises:
        OSError: there is not enough memory.
    """
    first, length = region or (0, len(block))
    pages = -(-length // mmap.PAGESIZE)
    start, stop = (first + pages * index // parts * mmap.PAGESIZE for index in (part, part + 1))
    if start == stop:
        return
    memory = np.frombuffer(block, dtype=np.uint8)
    with ThreadPoolExecutor(host_threads.share()) as threads:
        for begin in range(start, stop, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, stop)
            cuts = _cut(memory, begin, end)
            any((map if len(cuts) == 1 else threads.map)(_populate, cuts))
            progress(end - start, stop - start)


def _cut(memory: np.ndarray, begin: int, end: int) -> list[np.ndarray]:
    """Parts for threads, cut at the borders of large pages."""
    first = -(memory.ctypes.data + begin) % LARGE_PAGE_BYTES + begin
    cuts = [begin, *range(first, end, THREAD_BYTES), end]
    return [memory[low:high] for low, high in itertools.pairwise(cuts) if low < high]


def _populate(memory: np.ndarray) -> None:
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.size)
    if not _LIBC.madvise(address, size, MADV_POPULATE_WRITE):
        return
    why = ctypes.get_errno()
    if why != errno.EINVAL:
        raise OSError(why, f"{memory.size} bytes of host memory cannot be allocated: {os.strerror(why)}")
    memory[:: mmap.PAGESIZE] |= 0  # an older kernel makes a page when it is written to
