"""The lower bound of workloads at the edge: layers without parameters, no host copy, padding, uneven nodes."""

import pytest
from edge_workloads import ONE, parameters, work_of
from msgspec.structs import replace
from planning_cases import line, make_table

from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.cost import cost_table as cost
from megatron_ext.planner import plan
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload import workload


@pytest.mark.parametrize(
    "chunks, shape",
    [
        ([parameters(4096, layers=[1])], ONE | {"kinds": ("embedding", "transformer")}),
        ([(), parameters(4096)], dict(pp=2, vp=1, order="1f1b", microbatches=2)),
        ([()], ONE),
    ],
)
def test_the_bound_knows_that_gradients_may_be_reduced_beside_layers_without_any(chunks, shape):
    work = work_of(chunks, **shape)
    table = make_table(work, reduce=line(30, 1e4))
    assert plan(work, table).predicted.iteration_time_us >= lower_bound(work, Timing(work, table)) * (1 - 1e-9)


def test_the_bound_knows_a_drive_without_a_host_copy():
    """Its reads are not beside PCIe copies that were never measured."""
    work = work_of([parameters(*[1 << 16] * 8)], limits=workload.Limits(nvme_slots=3), **ONE)
    fast = dict(forward=1, backward=1, publish=(0.1, 1e6), topology=cost.Topology(nic_shares_pcie=True))
    table = make_table(work, gpu=(1, 500), cpu=None, nvme=(1, 500), **fast)
    assert plan(work, table).predicted.iteration_time_us >= lower_bound(work, Timing(work, table)) * (1 - 1e-9)


def test_the_bound_knows_groups_that_padding_carries_past_the_last_size():
    work = work_of([parameters(65 * 128)], **ONE)
    points = tuple(cost.Point(size_bytes=size, p50_us=us) for size, us in ((1024, 1e4), (16384, 10001.0)))
    table = replace(
        make_table(work, cpu=None, forward=1, backward=1), routes=cost.Routes(gpu=cost.Curve(points=points))
    )
    assert plan(work, table).predicted.iteration_time_us >= lower_bound(work, Timing(work, table)) * (1 - 1e-9)
