"""A schedule keeps its own limits, and those of the workload it is held against."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule.footprint import device_peaks, pinned_host_bytes
from megatron_ext.schedule.match import match
from megatron_ext.schedule.validate import InvalidSchedule, validate
from megatron_ext.workload import workload


def published(zero_stage: int = 3):
    work = make_workload(zero_stage=zero_stage)
    return plan(work, make_table(work, gpu=None)), work


def test_host_copies_over_the_schedules_own_limit_are_refused_without_the_workload():
    schedule, _ = published()
    need = max(pinned_host_bytes(schedule))
    assert validate(replace(schedule, limits=replace(schedule.limits, pinned_host_bytes=need)))
    with pytest.raises(
        InvalidSchedule,
        match=rf"limits.pinned_host_bytes = {need - 1}: node 0 needs {need} bytes of pinned host memory, 1 more",
    ):
        validate(replace(schedule, limits=replace(schedule.limits, pinned_host_bytes=need - 1)))


@pytest.mark.parametrize("name", ("whole_parameter_bytes", "pinned_host_bytes"))
def test_a_workload_with_less_room_refuses_the_schedule(name):
    schedule, work = published()
    need = max(device_peaks(schedule) if name == "whole_parameter_bytes" else pinned_host_bytes(schedule))
    match(schedule, workload.check(replace(work, limits=workload.Limits(**{name: need}))))
    small = workload.check(replace(work, limits=workload.Limits(**{name: need - 1})))
    with pytest.raises(InputError, match=rf"limits.{name} = None: .* {need} bytes .*, the workload allows {need - 1}"):
        match(schedule, small)
    with pytest.raises(InputError, match="the workload allows"):
        evaluate(small, make_table(work), schedule)


def test_nodes_with_different_numbers_of_replicas_have_no_host_copies():
    """Three replicas on nodes of two ranks: what a run would refuse is not planned, and not valid."""
    work = make_workload(pp=2, vp=1, dp=3, order="1f1b", gpus_per_node=2)
    table = make_table(work)
    planned = plan(work, table)
    assert not planned.publish and validate(planned)
    with pytest.raises(
        InputError, match="parallel.gpus_per_node = 2: nodes hold different numbers of replicas, which cpu cannot serve"
    ):
        plan(work, make_table(work, gpu=None))
    with pytest.raises(InputError, match="policy = 'all-cpu': .*unevenly over 2 nodes"):
        plan(work, table, policy="all-cpu")
