"""Overlap of two kinds of work, and what the doctor makes of it."""

from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do

from megatron_ext.doctor.overlap import Work, overlap_of
from megatron_ext.doctor.place import Place


@pytest.mark.parametrize(("together", "share"), [(2.0, 1.0), (3.0, 0.0), (2.5, 0.5), (3.5, -0.5)])
def test_the_share_that_is_hidden(together, share):
    assert overlap_of(2.0, 1.0, together) == share


class Clocked:
    """Work whose rounds take as long as said, on a clock of its own."""

    def __init__(self, clock, name: str, seconds: float):
        self.clock, self.name, self.seconds, self.issued = clock, name, seconds, []

    def issue(self, size_bytes: int, round_index: int):
        self.issued.append(round_index)
        self.clock.append(self.seconds)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def work(monkeypatch):
    clock: list[float] = []
    fabric = SimpleNamespace(
        world_size=1, torch_device=torch.device("cpu"), barrier=lambda: None, agree=lambda value: value
    )
    monkeypatch.setattr("megatron_ext.doctor.overlap.perf_counter", lambda: sum(clock))
    as_ranks_do(monkeypatch, lambda value: [value])
    operations = {"gpu": Clocked(clock, "gpu", 0.02), "compute": Clocked(clock, "compute", 0.01)}
    return Work(fabric, operations, 4096, seconds=0.1)


def test_every_kind_of_work_takes_about_as_long(work):
    assert work.alone == {
        name: pytest.approx(work.rounds[name] * each) for name, each in (("gpu", 0.02), ("compute", 0.01))
    }
    assert all(0.08 < seconds < 0.11 for seconds in work.alone.values())


def test_work_that_comes_one_after_the_other_has_no_overlap(work):
    together = work.time("gpu", "compute")
    assert overlap_of(work.alone["gpu"], work.alone["compute"], together) == pytest.approx(0, abs=1e-6)


def test_places_know_their_node():
    place = Place(5, 8, 1, 4, torch.device("cpu"), lambda value: [value], None)
    assert place.nodes == 2 and not place.on_cuda
