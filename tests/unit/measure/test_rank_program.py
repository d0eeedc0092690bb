"""How often a size is visited, and for how many rounds."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.measure import rank_program
from megatron_ext.measure.options import Options
from megatron_ext.measure.sampling import MAX_ROUNDS, Samples

TIMES_US = {("cpu", 8192): 100.0, ("cpu", 65536): 5000.0, ("gpu", 8192): 100.0}


@pytest.fixture
def visits(monkeypatch):
    """(name, bytes, most rounds) of every visit of a measurement with one rank, for which time stands still."""
    seen = []

    def sample(fabric, operation, size, seconds, max_rounds):
        seen.append((operation.name, size, max_rounds))
        found = Samples()
        found.us = found.issued_us = found.processor_us = [TIMES_US.get((operation.name, size), 9000.0)] * max_rounds
        return found

    monkeypatch.setattr(rank_program, "sample", sample)
    monkeypatch.setattr(rank_program, "monotonic", lambda: 0.0)
    monkeypatch.setattr(
        rank_program,
        "OPERATIONS",
        {name: lambda fabric, name=name: SimpleNamespace(name=name, close=lambda: None) for name in ("cpu", "gpu")},
    )
    monkeypatch.setattr(rank_program.dist, "all_gather_object", lambda everyone, own: everyone.__setitem__(0, own))
    monkeypatch.setattr(rank_program, "MAX_PASSES", rank_program.PASSES)
    options = Options(data_parallel_size=1, sizes=(8192, 65536), links=("cpu", "gpu"))
    return SimpleNamespace(seen=seen, raw=rank_program.run(fabric_of(options), lambda *_: None))


def fabric_of(options):
    return SimpleNamespace(
        options=options,
        rank=0,
        world_size=1,
        pipe=None,
        agree=lambda value: value,
        barrier=lambda: None,
        torch_device=torch.device("cpu"),
    )


@pytest.mark.parametrize(("links", "share"), [(("compute",), 1.0), (("compute", "cpu"), rank_program.COMPUTE_SHARE)])
def test_compute_asked_for_alone_has_all_of_the_time(visits, monkeypatch, links, share):
    given, taken = [], []

    class ComputeRounds:
        def __init__(self, fabric, runners, seconds, parts, report):
            given.append(seconds)

        def take(self, part):
            taken.append(part)

        def result(self):
            return {}

    monkeypatch.setattr(rank_program.shared_processors, "ComputeRounds", ComputeRounds)
    monkeypatch.setattr(rank_program.shared_processors, "runners_of", lambda fabric: {})
    options = Options(data_parallel_size=1, sizes=(8192,), seconds=10, links=links)
    rank_program.run(fabric_of(options), lambda *_: None)
    assert given == [pytest.approx(10 * share)] and taken == list(range(rank_program.PASSES))


def test_short_host_copies_are_visited_more_often_for_as_many_rounds(visits):
    counts = Counter(visits.seen)
    later = rank_program.PASSES - 1
    assert (
        counts["cpu", 8192, MAX_ROUNDS] == 1
        and counts["cpu", 8192, MAX_ROUNDS // rank_program.SHORT_VISITS] == later * rank_program.SHORT_VISITS
    )
    for long in (("cpu", 65536), ("gpu", 8192), ("gpu", 65536)):
        assert (
            counts[(*long, MAX_ROUNDS)] == rank_program.PASSES
            and counts[(*long, MAX_ROUNDS // rank_program.SHORT_VISITS)] == 0
        )


def test_visits_of_one_pass_count_together(visits):
    points = {name: {point["size_bytes"]: point for point in rows} for name, rows in visits.raw["curves"].items()}
    for name in ("cpu", "gpu"):
        for size in (8192, 65536):
            assert (
                points[name][size]["samples"] == rank_program.PASSES * MAX_ROUNDS
                and points[name][size]["passes"] == rank_program.PASSES
            )
