"""A measurement ends in its time whatever is measured, says what it left out, and goes on after a kill."""

from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do
from msgspec.structs import replace

from megatron_ext.measure import kept_measurement, rank_program, scaled_sizes
from megatron_ext.measure.assemble_table import assemble_table
from megatron_ext.measure.options import MIB, STEPS, Options
from megatron_ext.measure.sampling import Samples
from megatron_ext.measure.size_grid import announcement
from megatron_ext.runtime.device import HostDevice

LINKS = ("cpu", "publish", "optimizer", "host_add", *STEPS)
LARGE = Options(
    data_parallel_size=1,
    device="cpu",
    seconds=20.0,
    optimizer_on_host=True,
    max_bytes=400 * MIB,
    max_rank_bytes=3200 * MIB,
    links=LINKS,
)
"""Of 1.6 billion parameters: with these rates a visit of all of them takes a minute."""

SECONDS_PER_BYTE = {"optimizer": 4e-9, "cpu": 2e-11} | dict.fromkeys(STEPS[:-1], 2e-9)
BUILD_PER_BYTE = {"optimizer": 1e-8} | dict.fromkeys(STEPS[:-1], 5e-9)


class Killed(Exception):
    pass


@pytest.fixture
def machine(monkeypatch):
    """One whose clock runs by what is measured; it is killed after ``kill_after`` visits."""
    state = SimpleNamespace(now=0.0, visits=[], kill_after=None, bytes_there={})

    def sample(fabric, operation, size, seconds, max_rounds):
        state.visits.append((operation.name, size))
        if len(state.visits) == state.kill_after:
            raise Killed
        us = 20.0 + size * SECONDS_PER_BYTE.get(operation.name, 1e-10) * 1e6
        built = size * BUILD_PER_BYTE.get(operation.name, 0.0) + 2 * us / 1e6
        rounds = max(1, min(max_rounds, int((seconds - built) * 1e6 / us)))
        state.now += built + rounds * us / 1e6
        found = Samples()
        found.us = found.issued_us = [us] * rounds
        return found

    def operation(name):
        made = SimpleNamespace(name=name, builds=name != "cpu", close=lambda: None, drop=lambda: None)
        made.made_bytes = lambda size: (0, state.bytes_there.get(name, 0) * size)
        made.issue = lambda size, index: SimpleNamespace(wait=lambda: None)
        return type(name, (), {"name": name, "__new__": lambda cls, fabric: made})

    monkeypatch.setattr(rank_program, "sample", sample)
    monkeypatch.setattr(rank_program, "monotonic", lambda: state.now)
    monkeypatch.setattr(rank_program, "OPERATIONS", {name: operation(name) for name in LINKS[:4]})
    for kind, name in (
        ("HostOptimizer", "optimizer"),
        ("TimedHostStep", "host_step"),
        ("RunStep", "host_step_joined"),
        ("RunStepCastOnDevice", "host_step_cast_on_device"),
        ("DeviceStep", "device_step"),
    ):
        monkeypatch.setattr(rank_program, kind, operation(name))
    as_ranks_do(monkeypatch, lambda own: [own])
    return state


def run(options, **memory):
    fabric = SimpleNamespace(
        ranks_per_device=1,
        options=options,
        rank=0,
        world_size=1,
        agree=lambda value: value,
        barrier=lambda: None,
        torch_device=torch.device("cpu"),
        device=HostDevice(),
        set_up_seconds=None,
        set_up_bytes=0,
        arena_bytes=memory.get("arena_bytes", 1 << 40),
        has_room=lambda host_bytes, device_bytes: device_bytes <= memory.get("device_bytes", 0),
    )
    return rank_program.run(fabric, lambda *_: None)


@pytest.mark.parametrize("seconds", (10.0, 20.0, 120.0))
def test_a_large_model_with_its_optimizer_on_the_host_is_measured_in_time(machine, seconds):
    options = replace(LARGE, seconds=seconds)
    table = assemble_table(options, run(options))
    assert machine.now <= 1.2 * seconds
    notes = [note for note in table.metadata.notes if note.startswith("out of time or memory, optimizer: ")]
    measured = max(size for name, size in machine.visits if name == "optimizer")
    assert measured < 3200 * MIB and len(notes) == 1 and f"from {measured / MIB:.4g} MiB" in notes[0]
    # What there was no time for is in the table: near what it takes, and not surer than it can be.
    (*_, last) = table.optimizer.points
    truth = 20.0 + last.size_bytes * SECONDS_PER_BYTE["optimizer"] * 1e6
    assert last.size_bytes == options.rounded(3200 * MIB) and last.p50_us == pytest.approx(truth, rel=0.02)
    assert last.p95_us > 1.05 * last.p50_us and last.samples == 1
    assert not any("memory, cpu" in note for note in table.metadata.notes)


def test_what_does_not_fit_the_device_is_scaled_from_what_does(machine):
    """A model whose tensors for one step take more than the device has, and a group that takes more than its part."""
    machine.bytes_there = {"device_step": 11.0, "optimizer": 5.0}
    options = replace(LARGE, seconds=3600.0)
    table = assemble_table(options, run(options, device_bytes=1000 * MIB, arena_bytes=100 * MIB))
    largest = {name: max(size for own, size in machine.visits if own == name) for name, _ in machine.visits}
    assert largest["device_step"] <= 1000 * MIB / 11 and largest["optimizer"] <= 200 * MIB
    assert largest["cpu"] <= 100 * MIB and largest["publish"] <= 100 * MIB
    assert largest["host_step"] == options.rounded(400 * MIB)
    for curve, size in ((table.device_step, 400), (table.optimizer, 3200), (table.routes.cpu, 400)):
        assert curve.points[-1].size_bytes == options.rounded(size * MIB)
    assert sum(note.startswith("out of time or memory, ") for note in table.metadata.notes) == 4


def test_a_kill_keeps_what_was_measured_and_the_next_call_goes_on(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_measurement, "KEEP_SECONDS", 0.1)
    out = str(tmp_path / "table.json")
    options = replace(LARGE, keep_path=kept_measurement.path_of(out))
    machine.kill_after = 50
    with pytest.raises(Killed):
        run(options)
    before = machine.visits[:40]
    machine.visits, machine.kill_after, machine.now = [], None, 0.0
    raw = run(options)
    assert not set(machine.visits[:5]) & set(before)  # the first pass goes on behind them
    sizes = {(name, row["size_bytes"]) for name, rows in raw["curves"].items() for row in rows}
    assert set(before) <= sizes and machine.now <= 1.2 * LARGE.seconds
    kept_measurement.remove(out)
    assert kept_measurement.read(options) == ({}, 0.0)


@pytest.mark.parametrize("changed", ({"threads": 2}, {"max_bytes": 8 * MIB}))
def test_what_was_kept_of_another_measurement_is_not_taken(tmp_path, changed):
    given = {"device": "cpu", "keep_path": str(tmp_path / "kept")}
    visits = {("cpu", 4096): [([[1.0]], [1.0])]}
    kept_measurement.write(Options(**given), visits, 3.0)
    assert kept_measurement.read(Options(**given, seconds=7.0)) == (visits, 3.0)
    assert kept_measurement.read(Options(**given | changed)) == ({}, 0.0)
    (tmp_path / "kept").write_text("{")
    assert kept_measurement.read(Options(**given)) == ({}, 0.0)


def test_nothing_is_scaled_from_sizes_that_say_nothing_of_it():
    rows = [{"size_bytes": 4096, "p50_us": 9.0, "p95_us": 9.0, "samples": 3, "passes": 1}]
    assert scaled_sizes.add_scaled(rows, [4096, 64 * MIB]) == rows
    (note,) = scaled_sizes.notes("cpu", rows, 64 * MIB)
    assert "--seconds" in note and "ends at 4096 bytes" in note
    assert scaled_sizes.notes("cpu", rows, 4096) == []


def test_what_is_measured_and_how_long_it_takes_is_said_before():
    text = announcement(LARGE)
    assert "optimizer (12)" in text and "20 s and at most 30 s" in text and "p2p" not in text
