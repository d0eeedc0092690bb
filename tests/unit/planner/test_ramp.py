"""Plans for the other numbers of micro-batches: the memory of the plan, and nearly the time of a plan of their own."""

import random

import pytest
from draw_schedule import draw_schedule, with_gradients
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext import planner
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.schedule.match import match

SLOWER = 1.06
"""At most, beside a plan that may group parameters for this number alone."""


@pytest.mark.parametrize(
    "policy, order, zero_stage, limits",
    [
        ("hybrid", "interleaved", 1, {}),
        ("hybrid", "1f1b", 3, {}),
        ("hybrid", "1f1b", 3, {"whole_parameter_bytes": 300_000}),
        ("all-gpu", "interleaved", 3, {"whole_parameter_bytes": 300_000}),
        ("all-cpu", "interleaved", 1, {}),
    ],
)
def test_memory_is_that_of_the_plan_and_time_that_of_a_plan_of_its_own(policy, zero_stage, limits, order):
    vp = 2 if order == "interleaved" else 1
    work = make_workload(microbatches=4, vp=vp, order=order, zero_stage=zero_stage, **limits)
    work = replace(work, ramp=(2,))
    table = make_table(work)
    main = planner.plan(work, table, policy=policy)
    (other,) = planner.plan_ramp(main, work, table)
    assert other.parallel.num_microbatches == 2
    assert (other.groups, other.publish, other.limits) == (main.groups, main.publish, main.limits)
    assert max(device_peaks(other)) <= max(device_peaks(main))
    alone = planner.plan(work.with_microbatches(2), table, policy=policy)
    assert other.predicted.iteration_time_us <= SLOWER * alone.predicted.iteration_time_us
    assert other.predicted.memory and planner.ramp_us([other]) == {2: other.predicted.iteration_time_us}


def test_gradients_are_reduced_no_later_than_behind_the_last():
    work = replace(make_workload(microbatches=6, zero_stage=2), ramp=(2,))
    table = make_table(work)
    main = with_gradients(random.Random(3), planner.plan(work, table), work, ("sharded",))
    assert max(group.reduce_every for group in main.groups) > 2
    (other,) = planner.plan_ramp(main, work, table)
    assert max(group.reduce_every for group in other.groups) == 2
    match(other, work.with_microbatches(2))


def test_groups_that_fit_no_other_number_are_refused():
    """Drawn groups lie across layers: not all that cross each other are whole at once in this drawn schedule."""
    work = make_workload(microbatches=4, zero_stage=3, layers=6, vp=1, order="1f1b")
    main = draw_schedule(random.Random(1), work)
    with pytest.raises(InputError, match="ramp = 2: no schedule fits with the groups planned for 4 micro-batches"):
        planner.plan_ramp(main, replace(work, ramp=(2,)), make_table(work))
