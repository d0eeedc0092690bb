"""An iteration takes as long as the device's path or the training thread's, whichever is longer."""

import h200_runs
import pytest
from msgspec.structs import replace
from planning_cases import WHOLE, make_table, make_workload

from megatron_ext import planner
from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.missing_ranges import MOST_LAUNCH_US, MOST_TENSOR_US
from megatron_ext.cost.perturbed_table import PerturbedTables
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.verdict import HELPS_NOT

ONE = make_workload(pp=1, vp=1, dp=1, layers=4, order="no_pipeline", microbatches=3, p2p_bytes=0)


def table_of(work, forward_us=None, backward_us=None, **launches):
    table = make_table(work, forward=100.0, backward=200.0, **WHOLE)
    names = {"forward_launch_us": forward_us, "backward_launch_us": backward_us}
    rows = tuple(replace(row, **names) for row in table.compute)
    known = cost.Launches(**{"reduce_us": 0.0, "tensor_us": 0.0, **launches}) if launches else None
    return cost.check(replace(table, compute=rows, launches=known))


def us(work, *launch_us, **launches):
    return evaluate(work, table_of(work, *launch_us, **launches)).iteration_time_us


def test_launches_that_are_shorter_than_the_device_s_work_cost_nothing():
    assert us(ONE, 90.0, 150.0) == us(ONE)


def test_longer_ones_are_the_iteration_whichever_way_they_are_longer():
    """The thread runs ahead, so short forwards make up for long backwards: only the sum counts."""
    assert us(ONE, 2000.0, 3000.0) == pytest.approx(3 * 5000)
    assert us(ONE, 10.0, 210.0) == us(ONE)


def test_calls_and_the_optimizer_s_parameters_come_on_top():
    tensors, groups = 4 * 5, len(planner.plan(ONE, table_of(ONE), policy="all-gpu").groups)
    found = us(ONE, 2000.0, 3000.0, reduce_us=7.0, tensor_us=11.0)
    assert found == pytest.approx(3 * 5000 + 7 * groups + 11 * tensors)


def test_a_pipeline_of_threads_has_a_bubble():
    """Stage 1 can launch nothing before it has its input."""
    work = make_workload(pp=2, vp=1, dp=1, layers=1, order="1f1b", microbatches=4, p2p_bytes=0)
    assert us(work, 2000.0, 3000.0) == pytest.approx((4 + 1) * 5000)


def test_a_tiny_gpt_is_limited_by_its_launches_on_an_h200_and_the_plan_says_so():
    """59 ms were measured. The sheet's figure for a layer comes from this run; that launches are the limit, and what
    the rest takes, does not."""
    work, table = h200_runs.tiny_run()
    schedule = planner.plan(work, table)
    verdict = planner.verdict(work, table, schedule)
    assert verdict.figures["iteration_time_us"] / 1e3 == pytest.approx(59, rel=0.1)
    assert verdict.figures["limit"] == "launches" and verdict.figures["answer"] == HELPS_NOT
    assert "limit: launches from Python" in verdict.text and "Neither routes nor memory help here" in verdict.text
    assert max(us for link, us in evaluate(work, table, schedule).busy_us.items() if link != "launches") < 6e3


def test_a_gpt_that_keeps_the_device_busy_is_not():
    assert h200_runs.predicted_ms(on_host=False) == pytest.approx(h200_runs.measured_ms("stock"), rel=0.1)


def test_launches_that_were_not_measured_on_a_device_are_a_range():
    table = table_of(ONE)
    rows = (cost.Compute(layer_kind="transformer", forward_us=10.0, backward_us=20.0),)
    overhead = cost.GroupOverhead(call_us=1.0)
    measured = replace(
        table, compute=rows, group_overhead=overhead, metadata=cost.Metadata(software={"backend": "nccl"})
    )
    tables = PerturbedTables(measured, ["compute"])
    layers, parameters = tables.missing
    assert layers == "launches of a layer, taken as 0 to 1500 us" and "of a parameter" in parameters
    most = tables.with_missing_at(1.0)
    (row,) = most.compute
    assert row.forward_launch_us == row.backward_launch_us == MOST_LAUNCH_US
    assert most.launches == cost.Launches(reduce_us=1.0, tensor_us=MOST_TENSOR_US)
    # With the optimizer on the host those of layers alone are measured.
    known = replace(measured, compute=(replace(rows[0], forward_launch_us=5.0, backward_launch_us=5.0),))
    assert PerturbedTables(known, ["compute"]).missing == (parameters,)
    assert not PerturbedTables(replace(measured, metadata=cost.Metadata()), ["compute"]).missing


def test_launches_waver_together_and_as_far_as_the_table_says():
    table = table_of(ONE, 100.0, 100.0, tensor_us=10.0, slowest=2.0)
    tables = PerturbedTables(table, ["compute"])
    off = tables.shifted("launches", 1.6449)
    factor = off.compute[0].forward_launch_us / 100
    assert factor == pytest.approx(2.0, rel=0.03) == off.launches.tensor_us / 10
    assert tables.shifted("compute", 1.0).compute[0].forward_launch_us == 100.0


@pytest.mark.parametrize("given, field", [({"tensor_us": -1.0}, "tensor_us"), ({"slowest": 0.5}, "slowest")])
def test_launches_that_cannot_be_are_refused(given, field):
    with pytest.raises(InputError, match=f"launches.{field}"):
        table_of(ONE, **given)
