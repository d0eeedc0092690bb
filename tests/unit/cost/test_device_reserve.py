"""What a device holds beside the bill, by hand."""

from msgspec.structs import replace

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.cost_table import CostTable, SetUp
from megatron_ext.cost.device_reserve import device_reserve
from megatron_ext.workload.parallel import Parallel


def test_by_hand():
    sheet = hardware_sheet.load("h100-nvlink")
    alone = device_reserve(sheet, Parallel.of(microbatches=1), layers=10, activation_bytes=0)
    assert alone.nccl_bytes == 0 and alone.rounding_bytes == 20 << 20 and alone.fragment_bytes == 0
    # The H200 held 0.43 to 0.58 GB above the bill in its allocator alone.
    assert alone.total_bytes > 0.58e9
    many = device_reserve(sheet, Parallel.of(pp=2, dp=2, tp=2, microbatches=2), layers=10, activation_bytes=10**9)
    assert many.nccl_bytes == 5 * 32 * (10 << 20)  # data, tensor, pipeline, tied embeddings, norm
    assert 0.11e9 < many.fragment_bytes < 0.12e9
    slow = device_reserve(hardware_sheet.load("l40s"), Parallel.of(dp=8, microbatches=1), layers=1, activation_bytes=0)
    assert slow.nccl_bytes == 2 * 4 * (10 << 20)


def test_what_was_measured_on_the_device_counts_for_context_and_nccl():
    sheet, sizes = hardware_sheet.load("h100-nvlink"), {"layers": 10, "activation_bytes": 0}
    parallel = Parallel.of(dp=8, microbatches=1)
    table = CostTable(schema_version=1, kind="cost_table", set_up=SetUp(beside_allocator_bytes=1_500_000_000))
    guessed, measured = device_reserve(sheet, parallel, **sizes), device_reserve(sheet, parallel, table=table, **sizes)
    assert measured.context_bytes + measured.nccl_bytes == 1_500_000_000
    assert measured[1] == guessed[1] and measured[3:] == guessed[3:]
    assert device_reserve(sheet, parallel, table=replace(table, set_up=SetUp()), **sizes) == guessed
