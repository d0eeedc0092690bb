"""What one rank's share of host memory carries: what threads and copies move together."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from gathered import as_ranks_do

from megatron_ext.cost.cost_table import Compute, Launches
from megatron_ext.measure import host_memory_rate
from megatron_ext.measure.assemble_table import assemble_table
from megatron_ext.measure.layer_times import measure_compute
from megatron_ext.measure.options import MIB, Options


def fabric_of(ranks=1, device="cpu"):
    return SimpleNamespace(
        options=Options(data_parallel_size=ranks, max_bytes=64 * MIB),
        world_size=ranks,
        torch_device=torch.device(device),
        barrier=lambda: None,
        agree=lambda value: value,
        device=SimpleNamespace(settle=lambda: None),
    )


def test_a_rank_adds_with_its_part_of_the_node_s_processors(monkeypatch):
    monkeypatch.setattr(host_memory_rate.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(host_memory_rate.os, "sched_getaffinity", lambda _: range(6))
    counts = [host_memory_rate.processors_of_rank(fabric_of(ranks)) for ranks in (1, 4, 16)]
    assert counts == [6, 2, 1]


def test_what_threads_and_copies_move_counts_together(monkeypatch):
    """Time stands still but for a second a round: threads add until the copies of one row are done."""
    issued, clock = [], iter(range(100))
    monkeypatch.setattr(host_memory_rate, "perf_counter", lambda: next(clock) / 2)

    class Adder:
        moved = 6000

        def __init__(self, arrays):
            self.stopped = SimpleNamespace(set=lambda: issued.append("stop"))

        def start(self):
            issued.append("start")

        def join(self, seconds=None):
            pass

    class Copy:
        def issue(self, size_bytes, index):
            issued.append(size_bytes)
            return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(host_memory_rate, "Adder", Adder)
    rate = host_memory_rate.rate(fabric_of(), [Copy(), Copy()], [[]], 1.0)
    copied = sum(size for size in issued if isinstance(size, int))
    assert copied == 2 * host_memory_rate.ROW * 64 * MIB and issued[0] == "start" and issued[-1] == "stop"
    assert rate == pytest.approx((copied + 6000) / 1.5)


def test_the_table_has_the_mean_rank_and_the_slowest_round(monkeypatch):
    rates = iter((10e9, 14e9, 12e9, 2e9, 13e9))
    monkeypatch.setattr(host_memory_rate, "rate", lambda *_: next(rates))
    as_ranks_do(monkeypatch, lambda own: [own, [6e9] * 5])
    monkeypatch.setattr(host_memory_rate, "NODE_BYTES", MIB)
    monkeypatch.setattr(host_memory_rate, "LEAST_BYTES", MIB)
    found = host_memory_rate.measure(fabric_of(2), 10.0)
    assert found == {"bytes_per_s": (12e9 + 6e9) / 2, "slow_bytes_per_s": (2e9 + 6e9) / 2}
    table = assemble_table(Options(device="cpu"), {"curves": {}, "host_memory": found})
    assert table.host_memory is not None and table.host_memory.slow_bytes_per_s == 4e9


def test_no_round_begins_where_those_before_took_too_long(monkeypatch):
    """The memory of all rounds is made once."""
    clock, given = iter([0.0, 1.0, 7.0]), []
    monkeypatch.setattr(host_memory_rate, "monotonic", lambda: next(clock))
    monkeypatch.setattr(host_memory_rate, "processors_of_rank", lambda fabric: 1)
    monkeypatch.setattr(host_memory_rate, "LEAST_BYTES", MIB)
    monkeypatch.setattr(host_memory_rate, "NODE_BYTES", MIB)
    monkeypatch.setattr(host_memory_rate, "rate", lambda fabric, copies, arrays, seconds: given.append(arrays) or 5e9)
    as_ranks_do(monkeypatch, lambda own: [own])
    assert host_memory_rate.measure(fabric_of(), 10.0)["bytes_per_s"] == 5e9
    assert len(given) == 2 and given[0] is given[1]


def test_a_thread_adds_all_of_its_memory_in_turn(monkeypatch):
    adder = host_memory_rate.Adder([numpy.ones(MIB, numpy.float32) for _ in range(2)])
    adder.stopped = SimpleNamespace(is_set=lambda: adder.moved >= 2 * 3 * 4 * MIB)
    adder.run()
    assert adder.moved == 2 * 3 * 4 * MIB and set(adder.sum) == {3.0}


class Runner:
    visits = 2

    def forward(self):
        pass

    backward = forward


def test_what_launching_a_layer_takes_is_kept_beside_what_the_device_takes(monkeypatch):
    from megatron_ext.measure import layer_times

    launches = iter([9.0] * 4 + [1.0, 3.0, 5.0, 7.0] * 3)  # the first micro-batch warms up
    monkeypatch.setattr(layer_times, "on_cuda", lambda: True)
    monkeypatch.setattr(
        layer_times, "DeviceTimer", lambda: SimpleNamespace(time=lambda key, call, alone: (100.0, next(launches)))
    )
    (row,) = measure_compute({"transformer": Runner()}, 3, warmup=1)
    assert (row.forward_us, row.forward_launch_us, row.backward_launch_us) == (100.0, 2.0, 6.0)


def test_a_reduce_and_a_parameter_of_the_optimizer_are_launches_too():
    """The shard of 4 MiB of float32 parameters of two ranks is two tensors of 512 x 512 elements."""
    points = {"p50_us": 1.0, "p95_us": 1.0, "samples": 1, "medians_us": [1.0], "passes": 2}
    curves = {
        "reduce": [{"size_bytes": 4096, "issued_us": 8.0, **points}],
        "optimizer": [{"size_bytes": 4 * MIB, "issued_us": 60.0, **points}],
    }
    options = Options(device="cpu", hidden_size=512)
    assert assemble_table(options, {"curves": curves}).launches == Launches(reduce_us=8.0, tensor_us=30.0)
    scaled = curves["optimizer"][0] | {"size_bytes": 16 * MIB, "scaled_from": 4 * MIB}
    with_scaled = curves | {"optimizer": [*curves["optimizer"], scaled]}  # its launches were not measured
    assert assemble_table(options, {"curves": with_scaled}).launches == Launches(reduce_us=8.0, tensor_us=30.0)
    del curves["optimizer"][0]["issued_us"]
    assert assemble_table(options, {"curves": curves}).launches is None
    assert Compute(forward_us=1.0, backward_us=1.0).forward_launch_us is None
