"""What an iteration is limited by."""

import pytest

from megatron_ext.cost.cost_table import KINDS
from megatron_ext.planner.what_limits import WORDS, limit_of, limit_text


@pytest.mark.parametrize(
    "busy_us, limit",
    [
        ({"compute": 70.0, "gpu": 60.0, "launches": 90.0}, "compute"),  # the thread is not what the iteration waits for
        ({"compute": 70.0, "gpu": 60.0, "launches": 100.0}, "launches"),
        ({"compute": 70.0, "publish": 80.0, "host_memory": 50.0}, "host_memory"),
        ({"compute": 70.0, "publish": 80.0, "host_memory": 30.0}, "publish"),
        ({"compute": 70.0, "publish": 60.0, "host_memory": 60.0}, "compute"),
        ({"compute": 30.0, "optimizer": 60.0}, "optimizer"),
        ({}, "compute"),
    ],
)
def test_the_limit_is_what_the_iteration_waits_for(busy_us, limit):
    assert limit_of(busy_us, 100.0) == limit


def test_every_activity_has_a_name():
    assert set(KINDS) < set(WORDS)
    assert limit_text("host_memory") == "limit: host memory (full longest)"
    assert limit_text("gpu") == "limit: all-gathers (what is busy longest)"
