"""Bill and census side by side, on the device and in host memory."""

from types import SimpleNamespace

from megatron_ext.formats import rank_memory
from megatron_ext.report.report_text import cautions, memory_rows

MIB = 1 << 20


def test_every_kind_of_both_places_has_a_row():
    bill = rank_memory.make({"shards": 2 * MIB}, {"gradients": 4 * MIB, "host_copies": 3 * MIB})
    census = rank_memory.make({"shards": 2 * MIB, "buffers": MIB}, {"gradients": 8 * MIB})
    found = memory_rows(SimpleNamespace(memory=((bill, census),)))
    assert found == [
        ("memory at the peak", "bill", "census", ""),
        ("  rank 0, shards, MiB", "2.00", "2.00", "1.000"),
        ("  rank 0, buffers, MiB", "0.00", "1.00", "0.000"),
        ("  rank 0, device in all, MiB", "2.00", "3.00", "0.667"),
        ("  rank 0, host gradients, MiB", "4.00", "8.00", "0.500"),
        ("  rank 0, host copies, MiB", "3.00", "0.00", ""),
        ("  rank 0, host in all, MiB", "7.00", "8.00", "0.875"),
    ]
    assert memory_rows(SimpleNamespace(memory=())) == []


def test_a_report_of_costs_of_a_shared_device_says_it():
    def report(**hardware):
        measured_on = SimpleNamespace(hardware=hardware)
        run = SimpleNamespace(
            schedule=SimpleNamespace(metadata=SimpleNamespace(options=SimpleNamespace(measured_on=measured_on)))
        )
        one = SimpleNamespace(median_us=1.0)
        pair = SimpleNamespace(stock=one, scheduled=one)
        return SimpleNamespace(
            run=run,
            iteration_time_us=(one, one),
            predicted_iteration_time_us=SimpleNamespace(stock=1.0, scheduled=1.0),
            gather_us=pair,
            measured_ratio=1.0,
        )

    (note,) = cautions(report(device="NVIDIA H200", ranks_per_device=8))
    assert "shared device (8 ranks on one)" in note
    assert cautions(report(device="NVIDIA H200")) == []
