"""Pages that a device copies to stay where they are when the process forks, as data loaders do."""

import ctypes
import mmap
import os

import torch

from megatron_ext.runtime import block_pages
from megatron_ext.runtime.page_locked import large_tensor


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


def test_a_child_sees_states_that_no_device_touches():
    """It writes a checkpoint of them (--async-save), while the parent goes on."""
    states = large_tensor(8, torch.float32).fill_(3)
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begin, 1)
        os._exit(not all(value == 3 for value in memoryview(states.numpy())))
    states.fill_(4)
    os.write(end, b"!")
    assert os.waitpid(child, 0)[1] == 0
    os.close(begin)
    os.close(end)


def frame(block: mmap.mmap) -> bytes:
    """Where the page lies in the machine, as the kernel tells root."""
    start = (ctypes.c_char * len(block)).from_buffer(block)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(ctypes.addressof(start) // mmap.PAGESIZE * 8)
        return pages.read(8)
