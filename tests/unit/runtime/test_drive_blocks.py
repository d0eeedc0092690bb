"""Many blocks in flight: each comes where it belongs, and one that fails ends the transfer it is a part of."""

import os
import random

import pytest

from megatron_ext.runtime import drive
from megatron_ext.runtime.drive import BLOCK, DriveError
from megatron_ext.runtime.worker import Transfer
from megatron_ext.workload.drive_reads import DriveReads

BLOCKS = 64


@pytest.fixture(params=[1, 3, 128])
def file(tmp_path, request):
    """Its every block begins with its number."""
    settings = DriveReads(block_bytes=BLOCK, queue_depth=request.param)
    file = drive.open_own(tmp_path, BLOCK * BLOCKS, settings)
    file.write(b"".join(number.to_bytes(8, "little") * (BLOCK // 8) for number in range(BLOCKS)), 0, "numbers")
    file.flush(0, BLOCK * BLOCKS, "numbers")
    yield file
    file.close()


def test_blocks_in_any_order(file):
    order = list(range(BLOCKS))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        memory = memoryview(drive.mmap.mmap(-1, BLOCK * BLOCKS))
        transfers = [Transfer() for _ in order]
        for place, (number, transfer) in enumerate(zip(order, transfers)):
            file.start(memory[place * BLOCK : (place + 1) * BLOCK], number * BLOCK, "a block", transfer)
        for place, (number, transfer) in enumerate(zip(order, transfers)):
            transfer.wait()
            assert int.from_bytes(memory[place * BLOCK : place * BLOCK + 8], "little") == number


def test_the_end_of_the_file_is_named(file):
    memory = memoryview(drive.mmap.mmap(-1, 2 * BLOCK))
    with pytest.raises(DriveError, match=f"two blocks: .* ends at byte {BLOCK * BLOCKS}, {BLOCK} bytes too early"):
        file.read(memory, BLOCK * (BLOCKS - 1), "two blocks")


def test_what_fails_behind_a_read_ends_it_and_no_other(file):
    memory, transfer = memoryview(drive.mmap.mmap(-1, BLOCK)), Transfer()

    def fail() -> None:
        raise ValueError("behind the read")

    file.start(memory, 0, "a block", transfer, fail)
    with pytest.raises(ValueError, match="behind the read"):
        transfer.wait()
    file.read(memory, 5 * BLOCK, "another")
    assert int.from_bytes(memory[:8], "little") == 5


def test_what_has_begun_has_ended_when_the_file_closes(tmp_path):
    file = drive.open_own(tmp_path, BLOCK * BLOCKS, DriveReads(block_bytes=BLOCK, queue_depth=1))
    transfer, memory = Transfer(), memoryview(drive.mmap.mmap(-1, BLOCK * BLOCKS))
    file.start(memory, 0, "all", transfer)
    descriptor = file.descriptor
    file.close()
    assert transfer.ended and transfer.error is None
    with pytest.raises(OSError):
        os.fstat(descriptor)
