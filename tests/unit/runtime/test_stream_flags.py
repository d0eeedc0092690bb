"""Flags that streams store and wait for: what the driver is asked, and a rank that cannot store any more."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.flags import DeviceFlag, HostFlag
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import DRIVE, FAILED, HostPool, PeerLost, Sharers
from megatron_ext.runtime.stream_flags import StreamFlagError, StreamFlags, open_stream_flags
from megatron_ext.runtime.streams import CudaStream

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


class Device(HostDevice):
    """Knows page-locked memory by other addresses."""

    def __init__(self, driver):
        self.flags = StreamFlags(driver)

    def address_offset(self, memory):
        return self.flags.offset(memory)


def pool_of_two(peer: int, device=HostDevice(), by_thread=frozenset()) -> tuple[HostPool, RankGroup]:  # noqa: B008
    """A pool as its rank 0 sees it; process ``peer`` is rank 1."""
    group = RankGroup(0, "chunk 0", torch.zeros(1 << 10), 0, 2)

    def exchange(value):
        return [value, peer if value == os.getpid() else value]

    return HostPool([Sharers([group], 0, 2, exchange)], {0}, by_thread, device), group


@pytest.fixture
def stream(monkeypatch):
    """``stream(driver)``: a stream of a device that is not there."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: STREAM)
    return lambda driver: CudaStream(torch.device("cuda", 0), StreamFlags(driver))


def check() -> None:
    """Whoever stores the flag is there."""


def test_the_driver_is_asked_for_every_rank_at_the_device_s_addresses(stream):
    driver = Driver()
    pool, group = pool_of_two(os.getpid(), Device(driver))
    pool.pin()
    start, own = pool.blocks[0].memory.data_ptr() + 4096, stream(driver)
    for flag in pool.flags[0, 0]:
        own.wait_flag(flag, 5, check)
    own.store(pool.flags[0, 0][0], 6)
    own.store(pool.reads_done[0], 3)
    assert driver.asked == [
        ("wait", 77, start, 5, 0),
        ("wait", 77, start + 64, 5, 0),
        ("store", 77, start, 6, 0),
        ("store", 77, start + 256, 3, 0),
    ]
    assert pool.published(group) == [0, 0]  # the stream does it, not the thread
    pool.close()


def test_no_stream_waits_for_a_flag_that_a_thread_stores(stream):
    driver = Driver()
    pool, _ = pool_of_two(os.getpid(), Device(driver), by_thread={0})
    streams = [stream(driver), HostDevice().stream("test")]
    for flag in (*pool.flags[0, 0], *pool.flags[0, DRIVE]):
        assert type(flag) is HostFlag
        for own in streams:
            with pytest.raises(AssertionError):
                own.wait_flag(flag, 1, check)
            with pytest.raises(AssertionError):
                own.store(flag, 1)
    assert driver.asked == [] and {type(flag) for flag in pool.reads_done} == {DeviceFlag}
    streams[1].close()
    pool.close()


def test_what_the_driver_refuses_is_an_error():
    flags = StreamFlags(Driver(code=801))
    for ask in (flags.wait, flags.store):
        with pytest.raises(StreamFlagError, match="801"):
            ask(STREAM, 4096, 1)


def test_without_the_package_threads_wait(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    flags, why = open_stream_flags(torch.device("cuda", 0))
    assert flags is None and why


@pytest.mark.parametrize("by_thread", [set(), {0}], ids=["stream", "thread"])
def test_the_watch_hears_of_a_rank_that_has_gone_or_failed(by_thread):
    gone = (1 << 22) + 1  # more than any process's number
    pool, _ = pool_of_two(gone, by_thread=by_thread)
    pool.flags[0, 0][0].store(2)
    with pytest.raises(PeerLost, match=f"process {gone}.* ended"):
        pool.check_peers(2)
    pool.flags[0, 0][1].store(2)
    pool.check_peers(2)  # it went after it had published
    pool.close()
    pool.check_peers(3)  # nobody waits any more
    pool, _ = pool_of_two(os.getpid(), by_thread=by_thread)
    pool.flags[0, 0][0].store(2)
    pool.check_peers(2)  # late, but there
    pool.flags[0, DRIVE][1].store(FAILED)
    with pytest.raises(PeerLost, match=r"rank 1 of this node \(process [0-9]+\) could not publish"):
        pool.check_peers(2)
    pool.fail(RuntimeError("full"))
    pool.check_peers(2)  # the thread that failed says what went wrong here
    pool.close()
