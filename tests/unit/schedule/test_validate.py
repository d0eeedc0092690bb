"""A schedule that nobody can train by is refused, with the field that is wrong."""

import math

import pytest
from msgspec.structs import replace
from planning_cases import expert_curves, make_table, make_workload, with_experts

from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.planner import plan
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.validate import InvalidSchedule, validate
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.parallel import Parallel


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


def test_what_nodes_allow_is_found_once_for_a_pipeline_rank_and_not_for_every_group(monkeypatch):
    """Every rank of a run validates: with 64 sets of experts' ranks a search of all of them for each group, or of all
    of them for each of them, takes seconds there."""
    work = with_experts(make_workload(pp=2, vp=2, dp=256, layers=8, gpus_per_node=8, zero_stage=3), ep=64, etp=1)
    schedule = plan(work, make_table(work, experts=expert_curves(work), publish=None, cpu=None), policy="all-gpu")
    assert len(schedule.groups) > 16
    made, replicas = [], Parallel.replicas

    def counted(self, *place):
        found = replicas(self, *place)
        made.extend(found)
        return found

    monkeypatch.setattr(Parallel, "replicas", counted)
    validate(schedule)
    assert len(made) <= 8 * 64


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


@pytest.fixture(scope="module")
def planned():
    work = make_workload()
    return plan(work, make_table(work), policy="all-gpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"iteration_time_us": -1.0}, r"iteration_time_us = -1.0: must be a positive, finite number"),
        ({"iteration_time_us": math.nan}, r"iteration_time_us = nan: must be a positive"),
        ({"iteration_time_us": 1e15}, r"iteration_time_us = 1000000000000000.0: is not a plausible time"),
        ({"iteration_time_us": 1.0}, r"exposed_us\[0\] = .*: is longer than the iteration's 1 us"),
        ({"lower_bound_us": 1e9}, r"lower_bound_us = 1000000000.0: is longer than the iteration"),
        ({"exposed_us": (1.0, -1e-3)}, r"exposed_us\[1\] = -0.001: must be a positive"),
        ({"exposed_us": (1.0,)}, r"exposed_us = 1: expected 2 figures"),
        ({"bubble_rate": 1.5}, r"bubble_rate = 1.5: expected 0 to 1"),
        ({"gather_us": math.inf}, r"gather_us = inf: must be a positive, finite number"),
        ({"busy_us": {"gpu": 1e14}}, r"busy_us.gpu = 100000000000000.0: is not a plausible time"),
        ({"baselines_us": {"stock": -1.0}}, r"baselines_us.stock = -1.0: must be a positive"),
        ({"peak_bytes": {"moon": (1, 2)}}, r"peak_bytes.moon: known: device, staging, pinned_host"),
        ({"peak_bytes": {"device": (1, -2)}}, r"peak_bytes.device\[1\] = -2: must not be negative"),
        ({"peak_bytes": {"device": (1, 2, 3)}}, r"peak_bytes.device = 3: expected 2 figures"),
        ({"memory": (RankMemory(device_bytes={"shards": 1 << 60}),) * 2}, r"memory\[0\].device_bytes.shards = "),
        ({"memory": (RankMemory(device_bytes={"gold": 1}),) * 2}, r"memory\[0\].device_bytes.gold: known: whole_"),
    ],
)
def test_a_prediction_that_no_run_has_is_refused(planned, change, said):
    assert planned.predicted.exposed_us[0] > 1 and validate(planned)
    with pytest.raises(InvalidSchedule, match=rf"predicted\.{said}"):
        validate(replace(planned, predicted=replace(planned.predicted, **change)))


def test_sizes_and_settings_that_no_run_has_are_refused(planned):
    options = replace(planned.metadata.options, nvme=DriveReads(block_bytes=5))
    for change, said in (
        ({"limits": replace(planned.limits, device_bytes=-1)}, "limits.device_bytes = -1"),
        ({"limits": replace(planned.limits, nvme_slots=1 << 62)}, "limits.nvme_slots = 4611686018427387904"),
        ({"groups": (replace(planned.groups[0], bytes=1 << 62), *planned.groups[1:])}, r"groups\[0\].bytes = "),
        ({"metadata": replace(planned.metadata, options=options)}, "metadata.options.nvme.block_bytes = 5"),
    ):
        with pytest.raises(InputError, match=said):
            validate(replace(planned, **change))
