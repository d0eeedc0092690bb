"""Figures that no cost table may hold."""

import pytest
from two_tables import table

from megatron_ext.cost.cost_table import Compute, Contention, Curve, Point, Routes, load
from megatron_ext.formats.errors import InputError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"contention": (Contention(measured="gpu", busy="h2d", slowdown=3),)},
            r"contention\[0\].busy = 'h2d': known: compute, gpu, cpu",
        ),
        (
            {"contention": (Contention(measured="gpu", busy="cpu", slowdown=3, size_bytes=-1),)},
            r"contention\[0\].size_bytes = -1: must not be negative",
        ),
        (
            {"routes": Routes(cpu=Curve(points=(Point(size_bytes=1, p50_us=1, issued_us=-1.0),)))},
            r"routes.cpu.points\[0\].issued_us = -1.0: must be a positive",
        ),
        (
            {"routes": Routes(gpu=Curve(points=(Point(size_bytes=1, p50_us=1), Point(size_bytes=2, p50_us=1e-308))))},
            r"routes.gpu.points\[1\].p50_us = 1e-308: is not a plausible time: expected 1e-12 to",
        ),
        (
            {"p2p": Curve(points=(Point(size_bytes=2, p50_us=0.9), Point(size_bytes=1, p50_us=1e3)))},
            r"p2p.points\[0\].p50_us = 0.9: is not a plausible time: less than 1/1000 of the 1000 us that 1 bytes take",
        ),
        (
            {"compute": (Compute(layer_kind="a", forward_us=3, backward_us=1, forward_p95_us=2),)},
            r"compute\[0\].forward_p95_us = 2: is below forward_us",
        ),
        (
            {"compute": (Compute(layer_kind="a", forward_us=1e15, backward_us=1),)},
            r"compute\[0\].forward_us = 1000000000000000.0: is not a plausible time",
        ),
        (
            {"contention": (Contention(measured="gpu", busy="cpu", slowdown=1e-300),)},
            r"contention\[0\].slowdown = 1e-300: is implausible",
        ),
    ],
)
def test_figures_that_would_be_passed_over_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        table(**fields)


def test_launches_of_one_kind_alone_are_refused(tmp_path):
    path = tmp_path / "T.json"
    path.write_text('{"schema_version": 2, "kind": "cost_table", "launches": {"reduce_us": 10.0}}')
    with pytest.raises(InputError, match="T.json: .*launches.*tensor_us|T.json: .*tensor_us.*launches"):
        load(path)
