"""The drive's file: what is written is read, nothing is left, a bad place is refused."""

import errno
import mmap
import os

import pytest
from variations import ALL
from warm_python import warm_children

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table
from megatron_ext.formats.errors import InputError
from megatron_ext.launch import launcher
from megatron_ext.measure.drive_file import open_filled
from megatron_ext.measure.nvme_route import best_settings
from megatron_ext.runtime.drive import BLOCK, DriveError, aligned, filesystem


def opened(directory, size_bytes=4 << 20, block_bytes=1 << 16, queue_depth=4):
    return open_filled(str(directory), size_bytes, block_bytes=block_bytes, queue_depth=queue_depth)


def memory(size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes))


@pytest.mark.parametrize("size", [BLOCK, 300_000, 1 << 20])
@pytest.mark.parametrize("queue_depth", [1, 4])
def test_what_is_written_is_read(tmp_path, size, queue_depth):
    drive = opened(tmp_path, queue_depth=queue_depth)
    try:
        slot, back = memory(aligned(size)), memory(aligned(size))
        slot[:] = os.urandom(len(slot))
        drive.write(slot, aligned(size), "a test")
        drive.flush(aligned(size), aligned(size), "a test")
        drive.read(back, aligned(size), "a test")
        assert back == slot
        drive.configure(1 << 17, queue_depth + 1)
        drive.read(back, 0, "a test")
        assert back != slot and any(back)  # not a hole that reads as zeroes
        drive.read(back, aligned(size), "a test")
        assert back == slot
        assert list(tmp_path.iterdir()) == []  # the file has no name
    finally:
        drive.close()


def test_reading_beyond_the_file_is_an_error(tmp_path):
    drive = opened(tmp_path, BLOCK)
    with pytest.raises(DriveError, match="too early"):
        drive.read(memory(2 * BLOCK), 0, "a test")
    drive.close()


def test_bad_places(tmp_path):
    with pytest.raises(InputError, match="--nvme-path = .*missing.*: is not a directory"):
        opened(tmp_path / "missing")
    with pytest.raises(InputError, match="--nvme-path = '/proc': cannot be written"):
        opened("/proc")
    with pytest.raises(InputError, match=rf"the drive is full: {1 << 60} bytes \(.* GiB\) are needed"):
        opened(tmp_path, 1 << 60)


def test_a_drive_that_fills_while_writing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InputError, match="the drive is full"):
        opened(tmp_path, BLOCK)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_reads_is_measured_otherwise(tmp_path, monkeypatch):
    plain = os.open

    def no_direct(path, flags, *mode, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", no_direct)
    drive = opened(tmp_path)
    back = memory(BLOCK)
    drive.read(back, 0, "a test")
    assert not drive.direct and any(back)
    drive.close()


def test_filesystem_is_named():
    assert filesystem("/dev/shm") == "tmpfs"
    assert filesystem("/proc/self") == "proc"


@pytest.fixture
def measure(tmp_path, capsys):
    """``measure(where)``: exit code, output and table of a measurement on the drive ``where``."""
    out = tmp_path / "T.json"

    def measure(where):
        words = f"measure --out {out} --links nvme,cpu --max-bytes 32768 --seconds 3 --nvme-path {where}"
        with warm_children(launcher):
            return cli.main(words.split()), capsys.readouterr(), out

    return measure


def test_a_measured_nvme_route(tmp_path, measure):
    where = tmp_path / "drive"
    where.mkdir()
    code, said, out = measure(where)
    assert code == 0, said.err
    table = cost_table.load(out)
    reads = table.routes.nvme.reads
    assert reads.block_bytes % BLOCK == 0 and reads.queue_depth >= 1
    assert table.routes.nvme.points[-1].size_bytes == 32768 == table.publish.nvme.points[-1].size_bytes
    assert list(where.iterdir()) == []


if ALL:  # a measurement of its own

    def test_tmpfs_is_measured_and_said(measure):
        code, said, out = measure("/dev/shm")
        assert code == 0, said.err
        assert "tmpfs: memory was measured, not a drive" in said.out
        assert any("tmpfs" in note for note in cost_table.load(out).metadata.notes)


def test_a_bad_place_ends_with_one_line(tmp_path, measure):
    code, said, out = measure(tmp_path / "missing")
    assert code == 2 and not out.exists()
    assert said.err.strip().split("\n")[-1].startswith("megatron-ext: --nvme-path = ")


def test_of_settings_about_as_fast_the_deepest_queue_is_taken():
    combinations = [(1, 1), (4, 1), (1, 4), (4, 4), (1, 16), (4, 16)]
    assert best_settings(combinations, [100, 80, 70, 70, 72, 71]) == (4, 16)
    assert best_settings(combinations, [100, 80, 70, 71, 90, 75]) == (4, 4)
    assert best_settings(combinations, [50, 80, 70, 70, 90, 75]) == (1, 1)
