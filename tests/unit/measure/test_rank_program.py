"""How often a size is visited, and for how many rounds."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do
from msgspec.structs import replace

from megatron_ext.measure import rank_program
from megatron_ext.measure.options import Options
from megatron_ext.measure.rank_program import PASSES, parts_due
from megatron_ext.measure.sampling import MAX_ROUNDS, Samples
from megatron_ext.measure.size_grid import sizes_of
from megatron_ext.measure.visits import merge_visits, shuffled
from megatron_ext.runtime.device import HostDevice

TIMES_US = {("cpu", 8192): 100.0, ("cpu", 65536): 5000.0, ("gpu", 8192): 100.0}


def operation_of(name, fabric):
    done = SimpleNamespace(wait=lambda: None)
    return SimpleNamespace(
        name=name,
        builds=False,
        close=lambda: None,
        issue=lambda size, round_index: done,
        made_bytes=lambda size: (3 * size, 0),
        drop=lambda: None,
    )


@pytest.fixture
def visits(monkeypatch):
    """(name, bytes, most rounds) of every visit of a measurement with one rank, for which time stands still."""
    seen = []

    def sample(fabric, operation, size, seconds, max_rounds):
        seen.append((operation.name, size, max_rounds))
        found = Samples()
        found.us = found.issued_us = [TIMES_US.get((operation.name, size), 9000.0)] * max_rounds
        return found

    monkeypatch.setattr(rank_program, "sample", sample)
    monkeypatch.setattr(rank_program, "monotonic", lambda: 0.0)
    monkeypatch.setattr(rank_program, "OPERATIONS", {name: partial(operation_of, name) for name in ("cpu", "gpu")})
    as_ranks_do(monkeypatch, lambda own: [own])
    monkeypatch.setattr(rank_program, "MAX_PASSES", rank_program.PASSES)
    options = Options(data_parallel_size=1, min_bytes=8192, max_bytes=8192, also_sizes=(65536,), links=("cpu", "gpu"))
    return SimpleNamespace(seen=seen, raw=rank_program.run(fabric_of(options), lambda *_: None), options=options)


def fabric_of(options):
    return SimpleNamespace(
        ranks_per_device=1,
        device=HostDevice(),
        options=options,
        rank=0,
        world_size=1,
        pipe=None,
        agree=lambda value: value,
        barrier=lambda: None,
        torch_device=torch.device("cpu"),
        set_up_seconds=None,
        set_up_bytes=0,
        arena_bytes=1 << 30,
        has_room=lambda host_bytes, device_bytes: True,
    )


def test_what_host_memory_takes_before_the_first_step_is_that_of_the_slowest_rank(monkeypatch):
    fabric = SimpleNamespace(world_size=2, set_up_seconds=(2.0, 8.0), set_up_bytes=1 << 31)
    fabric.torch_device = SimpleNamespace(type="cuda")
    others = [(4.0, 6.0), (2.0, 8.0)]
    as_ranks_do(monkeypatch, lambda own: others)
    assert rank_program.set_up_of(fabric) == {"pages_us_per_gib": 2e6, "pin_us_per_gib": 4e6}
    fabric.torch_device.type = "cpu"
    assert rank_program.set_up_of(fabric) == {"pages_us_per_gib": 2e6}
    others[0] = None
    assert rank_program.set_up_of(fabric) == {}


def test_a_device_holds_more_than_pytorchs_blocks(monkeypatch):
    """Two ranks share a device of 80 GB of which 10 are taken; the other rank has found 3."""
    fabric = SimpleNamespace(world_size=2, ranks_per_device=2, torch_device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(rank_program.torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(rank_program.torch.cuda, "memory_reserved", lambda device: 4 * 10**9)
    as_ranks_do(monkeypatch, lambda own: [own, 3 * 10**9])
    assert rank_program.outside_allocator(fabric) == {"beside_allocator_bytes": 3 * 10**9}
    monkeypatch.setattr(rank_program.torch.cuda, "memory_reserved", lambda device: 10**9)
    assert rank_program.outside_allocator(fabric) == {"beside_allocator_bytes": 4 * 10**9}
    assert rank_program.outside_allocator(fabric, 5 * 10**8) == {"beside_allocator_bytes": 35 * 10**8}
    fabric.torch_device.type = "cpu"
    assert rank_program.outside_allocator(fabric) == {}


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

    monkeypatch.setattr(rank_program, "ComputeRounds", ComputeRounds)
    monkeypatch.setattr(rank_program, "load_runners", lambda path, args: {"transformer": None})
    options = Options(
        data_parallel_size=1, min_bytes=8192, max_bytes=8192, seconds=10, links=links, modules="layers:layer_runners"
    )
    rank_program.run(fabric_of(options), lambda *_: None)
    assert given == [pytest.approx(10 * share)] and taken == list(range(rank_program.PASSES))


def test_what_there_is_is_handed_on_before_what_may_not_end(visits, monkeypatch):
    """Curves are there when host memory is measured, and this when contention is; their memory is freed before."""
    events = []
    monkeypatch.setattr(HostDevice, "close", lambda self: events.append("freed"))
    monkeypatch.setattr(rank_program.host_memory_rate, "measure", lambda *_: events.append("host memory") or {"a": 1})
    monkeypatch.setattr(rank_program.contention, "run", lambda *_: events.append("contention") or [])
    options = Options(
        data_parallel_size=1, min_bytes=8192, max_bytes=8192, links=("cpu", "gpu", "host_memory", "contention")
    )
    raw = rank_program.run(fabric_of(options), lambda *_: None, events.append)
    names = [event if isinstance(event, str) else "so far" for event in events]
    assert names == ["freed", "so far", "host memory", "so far", "contention"]
    first, second = (event for event in events if isinstance(event, dict))
    assert first["curves"] == raw["curves"] and first["host_memory"] is None and second["host_memory"] == {"a": 1}
    assert set(first["unmeasured_pairs"]) == {("gpu", "cpu"), ("cpu", "gpu")}


def test_what_one_rank_s_device_has_no_room_for_no_rank_measures(visits, monkeypatch):
    visits.seen.clear()
    as_ranks_do(monkeypatch, lambda own: [own, False] if own is True else [own])
    rank_program.run(
        fabric_of(Options(data_parallel_size=1, min_bytes=8192, max_bytes=8192, links=("cpu", "gpu"))), lambda *_: None
    )
    assert visits.seen == []


def test_measuring_begins_behind_all_that_is_started(visits):
    said = []
    options = Options(data_parallel_size=1, min_bytes=8192, max_bytes=8192, links=("cpu", "gpu"))
    rank_program.run(fabric_of(options), lambda done, total, what: said.append((done, what)))
    begins = said.index((1, "ready"))
    assert {done for done, _ in said[:begins]} == {0} and all(done for done, _ in said[begins:])


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


def test_writing_what_there_is_takes_a_small_part_of_the_time_however_much_there_is(visits, monkeypatch):
    """Of 2,048 ranks there are hundreds of megabytes, and all ranks wait for the first."""
    now, took, sampled = [0.0], [], rank_program.sample

    def sample(fabric, operation, size, seconds, max_rounds):
        now[0] += max(seconds, 0.1)
        return sampled(fabric, operation, size, seconds, max_rounds)

    def write(options, visits, seconds):
        now[0] += 6.0
        took.append(6.0)

    monkeypatch.setattr(rank_program, "sample", sample)
    monkeypatch.setattr(rank_program, "monotonic", lambda: now[0])
    monkeypatch.setattr(rank_program.kept_measurement, "write", write)
    options = replace(visits.options, seconds=300.0)
    rank_program.run(fabric_of(options), lambda *_: None)
    assert len(took) > 1 and sum(took) < 0.15 * now[0]


def test_visits_of_one_pass_count_together(visits):
    points = {name: {point["size_bytes"]: point for point in rows} for name, rows in visits.raw["curves"].items()}
    for name in ("cpu", "gpu"):
        for size in (8192, 65536):
            assert (
                points[name][size]["samples"] == rank_program.PASSES * MAX_ROUNDS
                and points[name][size]["passes"] == rank_program.PASSES
            )


def test_gathers_are_measured_at_further_sizes_beside_the_grid():
    options = Options(min_bytes=4096, max_bytes=16384, also_sizes=(10000, 70000))
    assert sizes_of("gpu", options) == sizes_of("cpu", options) == [4096, 7680, 10240, 16384, 70144]
    assert sizes_of("reduce", options) == [4096, 7680, 16384]  # what is no gather is not asked for
    assert options.largest == 70144  # and there is memory for it


def test_passes_walk_the_same_sizes_in_orders_of_their_own():
    visits = [("gpu", 1 << power) for power in range(12, 24)]
    orders = [shuffled(visits, number) for number in range(5)]
    assert all(sorted(order) == visits for order in orders)
    assert len({tuple(order) for order in orders}) == 5 and len({order[0] for order in orders}) > 1
    assert orders[3] == shuffled(visits, 3)  # as on every other rank


def test_compute_is_measured_all_along_however_short_the_passes_are():
    assert [parts_due(used / 20) for used in range(21)] == sorted(parts_due(used / 20) for used in range(21))
    assert parts_due(0.01) == 1 and parts_due(0.5) == (PASSES + 1) // 2 and parts_due(0.99) < PASSES
    assert parts_due(1.0) == parts_due(3.0) == PASSES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("internode", [(2.0, 4.0), (20.0, 40.0)]),
        ("gpu", [(4.0,), (40.0,)]),
        ("cpu", [(1.0, 2.0, 3.0, 4.0), (10.0, 20.0, 30.0, 40.0)]),
    ],
)
def test_what_a_curve_is_made_of(monkeypatch, name, expected):
    """Ranks that share a link end one after the other."""

    def gathered(own):
        return [
            {key: tuple([factor * value for value in part] for part in parts) for key, parts in own.items()}
            for factor in (1, 2, 3, 4)
        ]

    as_ranks_do(monkeypatch, gathered)
    fabric, merged = SimpleNamespace(world_size=4, options=Options(data_parallel_size=4, ranks_per_node=2)), {}
    merge_visits(fabric, {(name, 512): SimpleNamespace(us=[1.0, 10.0], issued_us=[1.0])}, merged)
    assert merged[name, 512][0][0] == expected
