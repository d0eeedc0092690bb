"""Many reads in flight: each block comes where it belongs, by the kernel's interface and by threads."""

import errno
import mmap
import os
import random
import threading

import pytest

from megatron_ext.runtime.block_reads import KernelReads, Request, ThreadReads, open_reads
from megatron_ext.runtime.worker import Transfer

BLOCK, BLOCKS = 4096, 64


@pytest.fixture
def direct(tmp_path):
    """A file whose every block begins with its number, opened past the page cache."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(number.to_bytes(8, "little") * (BLOCK // 8) for number in range(BLOCKS)))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    yield descriptor
    os.close(descriptor)


def read_all(reads, order: list[int], memory: memoryview) -> list[int]:
    """Results by place in ``order``."""
    results, all_there = [0] * len(order), threading.Semaphore(0)

    def request(place: int, number: int) -> Request:
        def done(result: int) -> None:
            results[place] = result
            all_there.release()

        return Request(
            memory[place * BLOCK : (place + 1) * BLOCK], number * BLOCK, done, lambda error: done(-errno.EIO)
        )

    for begin in range(0, len(order), 7):
        reads.read([request(place, number) for place, number in enumerate(order[begin : begin + 7], begin)])
    for _ in order:
        assert all_there.acquire(timeout=30)
    return results


@pytest.mark.parametrize("kind", [KernelReads, ThreadReads])
@pytest.mark.parametrize("queue_depth", [1, 3, 128])
def test_blocks_in_any_order(direct, kind, queue_depth):
    memory = mmap.mmap(-1, BLOCK * BLOCKS)
    reads = kind(direct, queue_depth)
    order = list(range(BLOCKS))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        with memoryview(memory) as view:
            assert read_all(reads, order, view) == [BLOCK] * BLOCKS
        for place, number in enumerate(order):
            assert int.from_bytes(memory[place * BLOCK : place * BLOCK + 8], "little") == number
    reads.close()
    memory.close()  # nobody holds a part of it any more


@pytest.mark.parametrize("kind", [KernelReads, ThreadReads])
def test_errors_and_ends_come_back_as_results(direct, kind, tmp_path):
    memory = mmap.mmap(-1, BLOCK * 2)
    reads = kind(direct, 2)
    assert read_all(reads, [BLOCKS, BLOCKS - 1], memoryview(memory)) == [0, BLOCK]
    reads.close()
    write_only = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    refused = kind(write_only, 2)
    assert read_all(refused, [0, 1], memoryview(memory)) == [-errno.EBADF] * 2
    refused.close()
    os.close(write_only)


@pytest.mark.parametrize("kind", [KernelReads, ThreadReads])
def test_a_reader_that_fails_does_not_keep_the_others_from_theirs(direct, kind):
    memory, reads, transfer = mmap.mmap(-1, BLOCK), kind(direct, 1), Transfer()

    def fail(result: int) -> None:
        raise ValueError("in the callback")

    reads.read([Request(memoryview(memory), 0, fail, transfer.finish)])
    with pytest.raises(ValueError, match="in the callback"):
        transfer.wait()
    assert read_all(reads, [5], memoryview(memory)) == [BLOCK]
    reads.close()


def test_what_a_run_has_no_time_to_read_is_no_failure_of_it(direct):
    """Reads that wait for room in the queue when it closes have no result; who still waits for them hears of it."""
    results, told, held = [], [], threading.Event()
    memory, reads = mmap.mmap(-1, BLOCK), KernelReads(direct, 1)
    first = Request(memoryview(memory), 0, lambda result: held.wait(30), told.append)
    reads.read([first, *(Request(memoryview(memory), 0, results.append, told.append) for _ in range(3))])
    threading.Timer(0.2, held.set).start()
    reads.close()
    assert told and {error.errno for error in told} == {errno.ECANCELED}
    assert set(results) <= {BLOCK} and len(results) + len(told) == 3


def test_this_kernel_reads_by_itself(direct, monkeypatch):
    reads = open_reads(direct, 2)
    assert isinstance(reads, KernelReads)
    reads.close()
    monkeypatch.setattr("megatron_ext.runtime.block_reads.SYSTEM_CALLS", {})
    threads = open_reads(direct, 2)
    assert isinstance(threads, ThreadReads)
    threads.close()
