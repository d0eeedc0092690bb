"""Pages that a device copies to stay where they are when the process forks, as data loaders do."""

import ctypes
import mmap
import os

from megatron_ext.runtime import block_pages


def test_a_child_does_not_take_pages_away():
    """Written after a fork, a page would be copied for the writer, and the device would go on with the old one."""
    block = block_pages.private(mmap.PAGESIZE)
    block[:4] = b"mine"
    page = frame(block)
    child = os.fork()
    if child == 0:
        os._exit(block[:4] != bytes(4))
    block[:4] = b"more"
    assert os.waitpid(child, 0)[1] == 0
    assert frame(block) == page and block[:4] == b"more"


def frame(block: mmap.mmap) -> bytes:
    """Where the page lies in the machine, as the kernel tells root."""
    start = (ctypes.c_char * len(block)).from_buffer(block)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(ctypes.addressof(start) // mmap.PAGESIZE * 8)
        return pages.read(8)
