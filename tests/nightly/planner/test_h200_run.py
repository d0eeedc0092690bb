"""A plan within the memory of a device, from its data sheet, beside the run by such a plan. The file has another run
whose parameters one thread cast; it is not predicted."""

import h200_runs
import pytest


def test_optimizer_gradients_and_shards_on_the_host():
    predicted = h200_runs.predicted_ms(on_host=True, device_bytes=12_000_000_000)
    assert predicted == pytest.approx(h200_runs.measured_ms("optimizer, gradients, shards on the host"), rel=0.2)
