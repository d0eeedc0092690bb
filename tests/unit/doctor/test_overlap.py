"""Overlap of two kinds of work, and what the doctor makes of it."""

from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do

from megatron_ext.doctor.overlap import EqualRounds, overlap_of, pair
from megatron_ext.doctor.place import Place
from megatron_ext.runtime.host_device import HostDevice


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
    fabric = SimpleNamespace(device=HostDevice(), barrier=lambda: None, agree=lambda value: value)
    monkeypatch.setattr("megatron_ext.doctor.overlap.perf_counter", lambda: sum(clock))
    as_ranks_do(monkeypatch, lambda value: [value])
    operations = {"gpu": Clocked(clock, "gpu", 0.02), "compute": Clocked(clock, "compute", 0.01)}
    return EqualRounds(fabric, operations, 4096, seconds=0.1)


def test_every_kind_of_work_takes_about_as_long(work):
    assert work.alone == {
        name: pytest.approx(work.rounds[name] * each) for name, each in (("gpu", 0.02), ("compute", 0.01))
    }
    assert all(0.08 < seconds < 0.11 for seconds in work.alone.values())


def test_work_that_comes_one_after_the_other_has_no_overlap(work):
    together = work.time("gpu", "compute")
    assert overlap_of(work.alone["gpu"], work.alone["compute"], together) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "sharing", "status", "said"),
    [
        ("cpu", 1, "could not try", "host processors"),
        ("cuda", 2, "could not try", "share one device"),
        ("cuda", 1, "fail", "of the shorter one is hidden"),
    ],
)
def test_work_one_after_the_other_is_a_fault_where_each_rank_has_a_device(work, kind, sharing, status, said):
    device = SimpleNamespace(type=kind)  # torch.device is the CPU everywhere once Megatron trains without a GPU
    place = Place(0, 2, 0, 2, device, lambda value: [value], None, sharing)
    found = pair(place, work, "gpu", "compute")
    assert found.status == status and said in found.found and abs(found.figures["overlap"]) < 1e-6


def test_places_know_their_node():
    place = Place(5, 8, 1, 4, torch.device("cpu"), lambda value: [value], None)
    assert place.nodes == 2 and not place.on_cuda
