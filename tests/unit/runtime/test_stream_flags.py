"""Flags that streams store and wait for: what the driver is asked, and a rank that cannot store any more."""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runtime.group import Group
from megatron_ext.runtime.host_pool import HostPool, PeerLost
from megatron_ext.runtime.stream_flags import StreamFlagError, StreamFlags, open_stream_flags

STREAM = SimpleNamespace(cuda_stream=77)


class Driver:
    """Notes what it is asked; answers with ``code``."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, code: int = 0):
        self.code, self.asked = code, []

    def cuStreamWaitValue64(self, *args):
        self.asked.append(("wait", *args))
        return (self.code,)

    def cuStreamWriteValue64(self, *args):
        self.asked.append(("store", *args))
        return (self.code,)

    def cuMemHostGetDevicePointer(self, address, flags):
        return self.code, address + 4096


class Device:
    def __init__(self, driver):
        self.flags = StreamFlags(driver)

    def pin(self, memory):
        """Nothing to lock."""

    unpin = pin


def pool_of_two(peer: int) -> tuple[HostPool, Group]:
    """A pool as its rank 0 sees it; process ``peer`` is rank 1."""
    group = Group(0, "chunk 0", torch.zeros(1 << 10), 0, 2)

    def exchange(value):
        return [value, peer if value == os.getpid() else value]

    return HostPool([group], {0}, 0, 2, exchange), group


def test_the_driver_is_asked_for_every_rank_at_the_device_s_addresses():
    driver = Driver()
    pool, group = pool_of_two(os.getpid())
    pool.pin(Device(driver))
    start = pool.memory.data_ptr() + 4096
    pool.wait_published(group, 5, STREAM)
    pool.set_published(group, 6, STREAM)
    pool.set_reads_done(3, STREAM)
    assert driver.asked == [
        ("wait", 77, start, 5, 0),
        ("wait", 77, start + 64, 5, 0),
        ("store", 77, start, 6, 0),
        ("store", 77, start + 128, 3, 0),
    ]
    assert pool.published(group).tolist() == [0, 0]  # the stream does it, not the thread
    pool.close()


def test_what_the_driver_refuses_is_an_error():
    flags = StreamFlags(Driver(code=801))
    for ask in (flags.wait, flags.store):
        with pytest.raises(StreamFlagError, match="801"):
            ask(STREAM, 4096, 1)


def test_without_the_package_threads_wait():
    flags, why = open_stream_flags(torch.device("cuda", 0))
    assert flags is None and why


def test_the_watch_hears_of_a_rank_that_has_gone_or_failed():
    gone = (1 << 22) + 1  # more than any process's number
    pool, group = pool_of_two(gone)
    pool.set_published(group, 2)
    with pytest.raises(PeerLost, match=f"process {gone}.* ended"):
        pool.check_peers(2)
    pool.flags.store(0, 1, 2)
    pool.check_peers(2)  # it went after it had published
    pool.close()
    pool.check_peers(3)  # nobody waits any more
    pool, group = pool_of_two(os.getpid())
    pool.set_published(group, 2)
    pool.check_peers(2)  # late, but there
    pool.fail(RuntimeError("full"))
    with pytest.raises(PeerLost, match="could not publish"):
        pool.check_peers(2)
    pool.close()
