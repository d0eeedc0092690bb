"""The rate of a drive while all ranks read it, whichever rank has filled its file first."""

from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do

from megatron_ext.doctor import direct_reads
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.formats.errors import InputError

RANKS = 8


class File:
    """A file that is read in half a second."""

    direct = True

    def __init__(self, done: list[str], clock: list[float], size: int):
        self.done, self.clock, self.size = done, clock, size

    def read(self, memory, offset, what):
        assert len(memory) == self.size and offset == 0
        self.done.append("read")
        self.clock[0] += 0.5

    def close(self):
        self.done.append("closed")


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """``checked(others, refused)``: the finding where other ranks take so many seconds, and what this rank has done."""

    def check(others: list[float], refused: Exception | None = None):
        done, clock = [], [0.0]

        def filled(directory, size, **how):
            if refused is not None:
                raise refused
            done.append("filled")
            return File(done, clock, size)

        as_ranks_do(monkeypatch, lambda own: [own, *others])
        for name, value in {
            "refuse_no_drive": lambda directory, option: None,
            "open_filled": filled,
            "time": SimpleNamespace(monotonic=lambda: clock[0]),
            "dist": SimpleNamespace(barrier=lambda group: done.append("all")),
        }.items():
            monkeypatch.setattr(direct_reads, name, value)
        place = Place(0, 2 * RANKS, 0, RANKS, torch.device("cpu"), lambda value: [value], SimpleNamespace())
        (found,) = direct_reads.check(place, DoctorOptions(out="", nvme=str(tmp_path)))
        return found, done

    return check


@pytest.mark.parametrize(("others", "seconds"), [([0.25], 0.5), ([0.5, 2.0], 2.0)])
def test_ranks_read_together_and_the_slowest_counts(checked, others, seconds):
    """A rank that read alone would have the whole drive, and all ranks would be said to get as much."""
    found, done = checked(others)
    assert done == ["filled", "all", "read", "closed"] and found.status == "pass"
    assert found.figures["gb_per_second"] == pytest.approx((32 << 20) / seconds / 1e9)


@pytest.mark.parametrize("kind", [InputError, RuntimeError])
def test_a_rank_whose_file_is_refused_still_meets_the_others(checked, kind):
    found, done = checked([0.5], refused=kind("the drive is full"))
    assert done == ["all"] and (found.status, found.found) == ("fail", "the drive is full")


def test_a_file_is_closed_if_there_is_no_memory_to_read_it_into(checked, monkeypatch):
    def refused(size):
        raise OSError("no host memory")

    monkeypatch.setattr(direct_reads.block_pages, "private", refused)
    found, done = checked([0.5])
    assert done == ["filled", "all", "closed"] and (found.status, found.found) == ("fail", "no host memory")


def test_memory_is_no_drive(checked, monkeypatch, tmp_path):
    monkeypatch.setattr("megatron_ext.runtime.drive.filesystem", lambda directory: "tmpfs")
    monkeypatch.setattr(direct_reads.dist, "barrier", lambda group: None)
    as_ranks_do(monkeypatch, lambda own: [own])
    place = Place(0, 1, 0, 1, torch.device("cpu"), lambda value: [value], SimpleNamespace())
    (found,) = direct_reads.check(place, DoctorOptions(out="", nvme=str(tmp_path)))
    assert found.status == "fail" and "tmpfs, which is memory" in found.found
