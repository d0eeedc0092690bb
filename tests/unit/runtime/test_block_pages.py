"""Pages of a shared block are made before they are needed, by all ranks, or refused on all."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import block_pages, shared_block
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import HostPool, Sharers

PAGES = 64


@pytest.fixture
def block():
    descriptor = shared_block.create_block(PAGES * mmap.PAGESIZE)
    mapped = mmap.mmap(descriptor, PAGES * mmap.PAGESIZE)
    yield descriptor, mapped
    os.close(descriptor)
    mapped.close()


def made(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512 // mmap.PAGESIZE


@pytest.mark.parametrize("advice", [block_pages.MADV_POPULATE_WRITE, 9999])
def test_parts_make_all_pages_together(block, monkeypatch, advice):
    """Also on a kernel that does not know the advice."""
    descriptor, mapped = block
    monkeypatch.setattr(block_pages, "MADV_POPULATE_WRITE", advice)
    monkeypatch.setattr(block_pages, "PIECE_BYTES", 4 * mmap.PAGESIZE)
    mapped[:4] = b"flag"
    said = []
    block_pages.make_pages(mapped, 1, 3, lambda done, total: said.append((done, total)))
    assert 21 <= made(descriptor) <= 24
    assert said[-1][0] == said[-1][1] and len(said) == 6
    for part in (0, 2):
        block_pages.make_pages(mapped, part, 3)
    assert made(descriptor) == PAGES and mapped[:4] == b"flag"


def test_nodes_that_the_process_may_use(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t0-1,4\n")
    monkeypatch.setattr(block_pages, "STATUS", tmp_path / "status")
    assert block_pages.memory_nodes() == [0, 1, 4]
    monkeypatch.setattr(block_pages, "STATUS", tmp_path / "nowhere")
    assert block_pages.memory_nodes() == []


def test_pages_take_turns_over_nodes_by_the_kernels_policy(block, monkeypatch):
    """Asked for node 0 alone the kernel takes the policy, and says so; of a node that is not there it refuses."""
    _, mapped = block
    monkeypatch.setattr(block_pages, "memory_nodes", lambda: [0, 0])
    accepted = block_pages.spread(mapped)
    mode = ctypes.c_int(-1)
    start = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    get_mempolicy = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    at_address = 2
    asked = ctypes.CDLL(None).syscall(
        get_mempolicy, ctypes.byref(mode), None, 0, ctypes.c_void_p(ctypes.addressof(start)), at_address
    )
    del start
    if asked == 0:  # a container may forbid both calls
        assert accepted and mode.value == block_pages.MPOL_INTERLEAVE
    else:
        assert not accepted
    monkeypatch.setattr(block_pages, "memory_nodes", lambda: [62, 63])
    assert not block_pages.spread(mapped)
    monkeypatch.setattr(block_pages, "memory_nodes", lambda: [0])
    assert not block_pages.spread(mapped)


def test_memory_that_cannot_be_had_is_refused_on_all_ranks(monkeypatch):
    def none_left(*_):
        raise OSError(12, "4096 bytes of host memory cannot be allocated: Cannot allocate memory")

    monkeypatch.setattr(block_pages, "make_pages", none_left)
    group = RankGroup(0, "chunk 0", torch.zeros(128), 0, 1)
    with pytest.raises(InputError, match="host memory = [0-9]+: 4096 bytes of host memory cannot be allocated"):
        HostPool([Sharers([group], 0, 1, lambda value: [value])], {0}, set(), HostDevice())


def test_the_whole_pool_is_page_locked_at_once_and_released_at_once():
    locked, unlocked = [], []

    class Device(HostDevice):
        pin = staticmethod(lambda memory: locked.append((memory.data_ptr(), memory.numel())))
        unpin = staticmethod(unlocked.append)

    groups = [RankGroup(index, "chunk 0", torch.zeros(1 << 12), 0, 1) for index in range(3)]
    pool = HostPool([Sharers(groups, 0, 1, lambda value: [value])], {0, 2}, set(), Device())
    assert locked == []
    pool.pin()
    ((address, size),) = locked
    assert size == pool.bytes >= groups[0].bytes + groups[2].bytes and unlocked == []
    pool.close()
    assert unlocked == [address] and len(locked) == 1


def test_pages_that_several_threads_make_are_large_where_they_may_be(monkeypatch):
    """Each part begins at a large page; what is asked of the kernel stands in its description of the mapping."""
    monkeypatch.setattr(block_pages.host_threads, "share", lambda: 3)
    monkeypatch.setattr(block_pages, "THREAD_BYTES", block_pages.LARGE_PAGE_BYTES)
    size = 5 * block_pages.LARGE_PAGE_BYTES + 3 * mmap.PAGESIZE
    block = block_pages.private(size)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    start = memory.data_ptr()
    text = Path("/proc/self/smaps").read_text().partition(f"{start:x}-")[2].partition("VmFlags:")
    flags = text[2].splitlines()[0].split()
    resident = int(text[0].partition("Rss:")[2].split()[0]) * 1024
    assert {"wf", "hg"} <= {*flags} and "sh" not in flags
    assert resident >= size and not memory.any()
