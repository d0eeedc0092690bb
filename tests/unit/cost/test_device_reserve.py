"""What a device holds besides the bill, by hand."""

import json

import pytest
from msgspec.structs import replace
from parallel_sizes import sized
from places import ROOT
from planning_cases import make_workload

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.cost_table import CostTable, SetUp
from megatron_ext.cost.device_reserve import CONTEXT_BYTES, LIBRARY_BYTES, device_reserve, temporary_bytes


def test_by_hand():
    sheet = hardware_sheet.load("h100-nvlink")
    alone = device_reserve(sheet, sized(microbatches=1), layers=10, activation_bytes=0)
    assert alone == CONTEXT_BYTES + LIBRARY_BYTES + (20 << 20)
    parallel, layers = sized(pp=2, dp=2, tp=2, microbatches=2), {"layers": 10, "activation_bytes": 0}
    many = device_reserve(sheet, parallel, **layers)
    assert many == alone + 5 * 32 * (10 << 20)  # data, tensor, pipeline, tied embeddings, norm
    assert device_reserve(sheet, parallel, **layers, context_parallel=2) == many + 32 * (10 << 20)
    assert 0.11e9 < device_reserve(sheet, parallel, layers=10, activation_bytes=10**9) - many < 0.12e9
    slow = device_reserve(hardware_sheet.load("l40s"), sized(dp=8, microbatches=1), **layers)
    assert slow == alone + 2 * 4 * (10 << 20)


SAVED = 1_074_921_508 / 8192
"""By a layer of hidden size 4096, a token: as measured on the device."""
STOCK_BYTES = 37_943_263_232
"""Of stock Megatron with everything on the device, by the bill."""


@pytest.mark.parametrize(
    "name, tokens",
    [
        ("timing: stock, all on the device", 8192),
        ("timing: optimizer, gradients, shards on the host", 8192),
        ("timing: gradients, shards on the host, optimizer on the device", 8192),
        ("timing: what fit finds within 12.1 GB", 2048),
        ("offload: 1.6B, 4 micro-batches, ours within 100 %", 8192),
        ("offload: 1.6B, 4 micro-batches, ours within 50 %", 8192),
        ("offload: 1.6B, 4 micro-batches, ours within 30 %", 8192),
        ("offload: 1.6B, 4 micro-batches, ours, the least", 8192),
        ("offload: 1.6B, 4 micro-batches, fit within 50 %", 2048),
        ("offload: 1.6B, 4 micro-batches, fit within 15 %", 16384),
    ],
)
def test_with_what_kernels_allocate_the_bill_is_what_an_h200_held(name, tokens):
    runs = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["runs"]
    figures = [row["figures"] for run in runs for row in run["results"] if row["case"] == name][-1]
    work = make_workload(pp=1, vp=1, dp=1, layers=1, order="no_pipeline")
    chunk = replace(work.chunks[0], activation_bytes=(int(SAVED * tokens),))
    billed = figures.get("predicted_device_bytes", STOCK_BYTES) + temporary_bytes(replace(work, chunks=(chunk,)))
    assert billed == pytest.approx(figures["device_peak_bytes"], rel=0.012)


def test_what_was_measured_on_the_device_counts_for_context_and_nccl():
    sheet, sizes = hardware_sheet.load("h100-nvlink"), {"layers": 10, "activation_bytes": 0}
    parallel = sized(dp=8, microbatches=1)
    table = CostTable(schema_version=1, kind="cost_table", set_up=SetUp(beside_allocator_bytes=1_500_000_000))
    guessed, measured = device_reserve(sheet, parallel, **sizes), device_reserve(sheet, parallel, table=table, **sizes)
    assert measured - 1_500_000_000 == guessed - CONTEXT_BYTES - 2 * 32 * (10 << 20)
    assert device_reserve(sheet, parallel, table=replace(table, set_up=SetUp()), **sizes) == guessed
