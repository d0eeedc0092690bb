"""A schedule that nobody can train by is refused, with the field that is wrong."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.validate import InvalidSchedule, validate


def test_host_copies_over_the_schedules_own_limit_are_refused_without_the_workload():
    work = make_workload(zero_stage=3)
    schedule = plan(work, make_table(work, gpu=None))
    need = max(pinned_host_bytes(schedule))
    assert validate(replace(schedule, limits=replace(schedule.limits, pinned_host_bytes=need)))
    with pytest.raises(
        InvalidSchedule,
        match=rf"limits.pinned_host_bytes = {need - 1}: node 0 needs {need} bytes of pinned host memory, 1 more",
    ):
        validate(replace(schedule, limits=replace(schedule.limits, pinned_host_bytes=need - 1)))


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
