"""A mapped block leaves no descriptor open, and what its first rank cannot make is refused on all."""

import errno
import mmap
import os

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import shared_block


def failing(number: int):
    def fail(*given):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def no_descriptor_is_left():
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_mapping_outlives_the_descriptor(no_descriptor_is_left):
    descriptor = shared_block.share(mmap.PAGESIZE, 0, lambda value: [value], field="ranks")
    memory = shared_block.mapped(descriptor, mmap.PAGESIZE)
    memory[:2] = b"ab"
    with pytest.raises(OSError):
        os.fstat(descriptor)
    memory.close()


def test_a_block_that_cannot_be_mapped_is_closed(no_descriptor_is_left, monkeypatch):
    descriptor = shared_block.create_block(mmap.PAGESIZE)
    monkeypatch.setattr(shared_block.mmap, "mmap", failing(errno.ENOMEM))
    with pytest.raises(OSError):
        shared_block.mapped(descriptor, mmap.PAGESIZE)


def test_a_block_that_is_too_large_for_a_file_is_refused_on_every_rank(monkeypatch):
    """As with ``ulimit -f``. The other ranks wait for what the first one says."""
    told: list = []
    monkeypatch.setattr(shared_block.os, "ftruncate", failing(errno.EFBIG))
    with pytest.raises(InputError, match="File too large"):
        shared_block.share(1 << 40, 0, lambda value: [told.append(value) or value], field="ranks")
    with pytest.raises(InputError, match="File too large"):
        shared_block.share(1 << 40, 1, lambda value: told, field="ranks")
