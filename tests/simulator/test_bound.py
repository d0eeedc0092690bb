"""No schedule beats the lower bound."""

import pytest

from megatron_ext.cost import model as cost
from megatron_ext.planner import plan
from megatron_ext.simulator.bound import lower_bound
from megatron_ext.simulator.timing import Timing
from planning_cases import make_table, make_workload

WORKLOADS = {
    "interleaved": dict(),
    "1f1b, by layer": dict(pp=3, vp=1, order="1f1b", layers=4),
    "gpipe": dict(pp=2, vp=2, order="gpipe"),
    "zero 3, loose": dict(zero_stage=3, layers=2),
    "zero 3, two chunks": dict(zero_stage=3, layers=2, device_bytes=420_000),
    "zero 3, a layer and a half": dict(zero_stage=3, layers=2, device_bytes=150_000),
    "little host memory": dict(pinned_host_bytes=200_000),
}

TABLES = {
    "links": dict(gpu=(5.0, 500.0), cpu=(2.0, 700.0), forward=20.0, backward=40.0),
    "compute": dict(),
    "contention": dict(
        gpu=(5.0, 900.0), cpu=(2.0, 900.0), forward=50.0, backward=90.0,
        contention=(("gpu", "cpu", 1.4), ("cpu", "gpu", 1.3), ("compute", "gpu", 1.2), ("compute", "cpu", 1.1)),
    ),
    "processors": dict(gpu=(5.0, 900.0), topology=cost.Topology(processors_per_node=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("costs", TABLES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_is_faster(name, costs):
    work = make_workload(**WORKLOADS[name])
    table = make_table(work, **TABLES[costs])
    bound = lower_bound(work, Timing(work, table))
    policies = ["all-gpu", *(f"random:{seed}" for seed in range(6))] + (["hybrid"] if costs != "processors" else [])
    for policy in policies:
        assert plan(work, table, policy=policy).predicted.step_time_us >= bound * (1 - 1e-9), policy


def test_bound_is_tight_where_one_thing_is_the_limit():
    """Compute alone; and one link alone, with compute of no size."""
    work = make_workload(pp=2, vp=1, order="1f1b", zero_stage=1)
    fast = make_table(work, gpu=(0.001, 1e9), cpu=None)
    assert plan(work, fast).predicted.step_time_us == pytest.approx(lower_bound(work, Timing(work, fast)), rel=1e-3)
    slow = make_table(work, gpu=(1.0, 10.0), cpu=None, forward=0.01, backward=0.01, p2p=(0.001, 1e9))
    assert plan(work, slow).predicted.step_time_us == pytest.approx(lower_bound(work, Timing(work, slow)), rel=1e-3)
