"""Plans within the memory of a device, from its data sheet, beside runs by such plans on one H200.

Both runs are of a release of 2026-11-27. Since then groups that one rank holds whole are not published any more, and
the device casts new parameters of their shards, so that a run by today's plan should take less time, not more.
"""

import json

import h200_runs
import pytest
from places import ROOT

RUNS = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["runs"]


@pytest.mark.parametrize(
    "case, on_host, device_bytes",
    [
        ("timing: optimizer, gradients, shards on the host", True, 12_000_000_000),
        ("timing: gradients, shards on the host, optimizer on the device", False, 30_360_000_000),
    ],
)
def test_shards_and_gradients_on_the_host(case, on_host, device_bytes):
    (measured, *_) = (
        result["figures"]["iteration_ms"] for run in RUNS for result in run["results"] if result["case"] == case
    )
    predicted = h200_runs.predicted_ms(on_host=on_host, device_bytes=device_bytes)
    assert 0.7 * measured < predicted < 1.05 * measured
