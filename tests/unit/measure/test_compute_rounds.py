"""Rounds of compute on all ranks at once."""

from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do

from megatron_ext.cost.cost_table import Compute
from megatron_ext.measure import compute_rounds
from megatron_ext.measure.compute_rounds import (
    LEAST_ROUNDS,
    MAX_REPEATS,
    MAX_ROUNDS,
    ComputeRounds,
    counts_within,
    middle,
)


@pytest.mark.parametrize("micro_batch_s", [0.001, 0.02, 0.1, 0.2, 0.4, 0.7, 1.5, 4.0, 9.0])
@pytest.mark.parametrize("seconds", [7.5, 15.0, 30.0])
def test_rounds_take_the_time_there_is_however_long_they_are(micro_batch_s, seconds):
    rounds, repeats, warmup = counts_within(seconds, micro_batch_s * 1e6, parts=5)
    takes = micro_batch_s * rounds * (warmup + repeats)
    assert takes <= max(3 * seconds, micro_batch_s * LEAST_ROUNDS)
    assert repeats >= 1 and (rounds >= 5 if micro_batch_s * 5 <= seconds else rounds >= LEAST_ROUNDS)
    assert warmup or repeats == 1


def test_rounds_are_rather_many_than_long():
    """A measurement that is stopped now and then must not have a stop in most of its rounds."""
    rounds, repeats, warmup = counts_within(94, 0.6e6, parts=5)
    assert rounds >= 40 and warmup + repeats <= 4
    assert counts_within(94, 100.0, parts=5) == (MAX_ROUNDS, MAX_REPEATS, 1)


def row(us: float) -> Compute:
    return Compute(
        layer_kind="a", samples=3, forward_us=us, forward_p95_us=us, backward_us=2 * us, backward_p95_us=2 * us
    )


def test_a_row_is_the_median_of_all_rounds_and_counts_their_samples():
    found = middle([row(1.0), row(9.0), row(2.0)])
    assert (found.forward_us, found.backward_p95_us, found.samples) == (2.0, 4.0, 9)


def test_rounds_of_all_ranks_count(monkeypatch):
    monkeypatch.setattr(compute_rounds, "measure_compute", lambda *args, **more: [row(20.0)])
    as_ranks_do(monkeypatch, lambda own: [own, own])
    options = SimpleNamespace(hidden_size=8, seq_length=4, micro_batch_size=1, sequence_parts=1)
    fabric = SimpleNamespace(world_size=2, rank=0, options=options)
    fabric.torch_device = torch.device("cpu")
    fabric.barrier, fabric.agree = (lambda: None), (lambda value: value)
    rounds = ComputeRounds(fabric, {"a": SimpleNamespace()}, 1.0, 5, lambda what: None)
    for part in range(5):
        rounds.take(part)
    (found,) = rounds.result()["rows"]
    assert found["forward_us"] == 20.0 and found["samples"] == 2 * 3 * rounds.result()["rounds"]


def test_no_round_begins_when_the_time_is_up(monkeypatch):
    """Rounds that take longer than the first ones did. All have one timer: it knows from the first how long the host
    takes, where later ones have no warm-up."""
    now, timers = [0.0], set()

    def measured(*args, timer, **more):
        timers.add(timer)
        now[0] += 1.0
        return [row(20.0)]

    monkeypatch.setattr(compute_rounds, "measure_compute", measured)
    monkeypatch.setattr(compute_rounds, "monotonic", lambda: now[0])
    device = torch.device("cpu")
    fabric = SimpleNamespace(torch_device=device, barrier=lambda: None, agree=lambda value: value)
    rounds = ComputeRounds(fabric, {"a": SimpleNamespace()}, 1.0, 1, lambda what: None)
    rounds.end = now[0] + 5.5
    rounds.take(0)
    assert now[0] == rounds.end + 0.5 and len(timers) == 1 and None not in timers


def test_what_the_first_use_of_a_gpu_loads_is_no_length_of_a_round(monkeypatch):
    calls, now = [], [0.0]

    def measured(*args, **more):
        now[0] += 0.001 if calls else 0.2
        calls.append(more)
        return [row(20.0)]

    monkeypatch.setattr(compute_rounds, "measure_compute", measured)
    monkeypatch.setattr(compute_rounds, "perf_counter", lambda: now[0])
    device = SimpleNamespace(type="cuda")  # torch.device would be the processor where CPU compatibility is installed
    fabric = SimpleNamespace(torch_device=device, barrier=lambda: None, agree=lambda value: value)
    rounds = ComputeRounds(fabric, {"a": SimpleNamespace()}, 1.0, 1, lambda what: None)
    rounds.take(0)
    assert len(calls) > 10  # of 0.2 s each there would be few
