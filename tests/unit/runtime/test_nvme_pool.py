"""The node's NVMe copy: what is written comes back, and what goes wrong is named."""

import os

import pytest
import torch
from negative_controls import cut_short

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import drive
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.drive import DriveError
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import Sharers
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.worker import Transfer
from megatron_ext.workload.drive_reads import DriveReads


def make_groups(dtype=torch.float32) -> list[RankGroup]:
    return [
        RankGroup(index, "chunk 0", torch.arange(numel, dtype=torch.float32).to(dtype), dp_rank=0, dp_size=2)
        for index, numel in enumerate((128, 1536, 70016))
    ]


def make_pool(directory, groups, **settings) -> NvmePool:
    largest = max(group.bytes for group in groups)
    return NvmePool(
        directory,
        [Sharers(groups, 0, 1, lambda value: [value])],
        slots=2,
        slot_bytes=largest,
        settings=DriveReads(**settings),
        device=HostDevice(),
    )


def read(pool: NvmePool, group: RankGroup, slot: int) -> None:
    transfer = Transfer()
    pool.start(group, slot, transfer)
    transfer.wait()


@pytest.fixture
def directory(tmp_path):
    if drive.filesystem(tmp_path) in drive.MEMORY_FILESYSTEMS:
        pytest.fail("the temporary directory is in memory; set TMPDIR to a directory on a drive")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
def test_shards_that_end_anywhere_come_back_whole(directory, dtype, block_bytes):
    groups = make_groups(dtype)
    pool = make_pool(directory, groups, block_bytes=block_bytes, queue_depth=3)
    for version in range(2):
        for group in groups:
            for dp_rank, shard in enumerate((group.whole + version).view(2, -1)):
                pool.write(group, dp_rank, shard)
            pool.flush(group)
        for slot, group in enumerate(groups[1:]):
            read(pool, group, slot)
        for slot, group in enumerate(groups[1:]):
            assert torch.equal(pool.staged(group, slot), group.whole + version)
    pool.close()


def test_nothing_lies_in_the_directory_even_while_the_pool_is_open(directory):
    pool = make_pool(directory, make_groups())
    assert os.listdir(directory) == []
    pool.close()


def test_a_read_that_comes_short_names_group_and_file(directory):
    groups = make_groups()
    pool = make_pool(directory, groups)
    cut_short(pool, groups[1])
    read(pool, groups[0], 0)
    with pytest.raises(DriveError, match=rf"group 1 \(chunk 0\).*{directory}.* too early"):
        read(pool, groups[1], 0)
    pool.close()


def test_a_drive_that_is_full_is_refused_before_training(directory, monkeypatch):
    """Without a reservation that fails: whatever else is written to the drive meanwhile would fail, too."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("all that is free was taken"))
    room = os.statvfs(directory)
    group = make_groups()[0]
    with pytest.raises(InputError, match=r"the drive is full: [0-9]+ bytes \(.* GiB\) are needed"):
        drive.create_file(directory, (room.f_bavail + room.f_bfree) * room.f_frsize + group.bytes)
    assert os.listdir(directory) == []


def test_a_drive_that_is_read_only_is_refused_where_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="--nvme-path = .*: cannot be written: read-only, or no permission"):
        drive.refuse_no_drive(tmp_path, "--nvme-path")


def test_memory_is_no_drive():
    if drive.filesystem("/dev/shm") not in drive.MEMORY_FILESYSTEMS:
        pytest.fail("/dev/shm is expected to be in memory on Linux")
    with pytest.raises(InputError, match="is on tmpfs, which is memory, not a drive"):
        drive.create_file("/dev/shm", 4096)


def test_a_directory_that_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match="--user-defined-schedule-nvme-path = .*: is not a directory"):
        make_pool(tmp_path / "nowhere", make_groups())


@pytest.mark.parametrize("values", [{"block_bytes": 100}, {"block_bytes": 0}, {"queue_depth": 0}])
def test_reads_that_cannot_be_made_are_refused(values):
    with pytest.raises(InputError, match=f"metadata.options.nvme.{next(iter(values))}"):
        DriveReads(**values).check("metadata.options.nvme")
