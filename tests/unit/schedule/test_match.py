"""A schedule is held against the workload that it is to train."""

import msgspec
import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule.footprint import device_peaks, pinned_host_bytes
from megatron_ext.schedule.match import match, match_layers
from megatron_ext.workload import workload


def published(zero_stage: int = 3):
    work = make_workload(zero_stage=zero_stage)
    return plan(work, make_table(work, gpu=None)), work


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


def test_a_schedule_for_other_instances_of_the_optimizer_is_refused():
    schedule, work = published()
    assert workload.fingerprint(work) == schedule.model.fingerprint
    split = replace(work, parallel=replace(work.parallel, num_distributed_optimizer_instances=2))
    with pytest.raises(InputError, match="parallel.num_distributed_optimizer_instances = 1: the run has 2"):
        match(schedule, split)
    nodes = replace(work, parallel=replace(work.parallel, gpus_per_node=1))
    with pytest.raises(InputError, match="parallel.gpus_per_node = .*: the run has 1; .* export LOCAL_WORLD_SIZE"):
        match(schedule, nodes)


def test_layers_are_compared_before_parameters():
    work = make_workload()
    schedule = all_gpu(work)
    named = msgspec.structs.replace(
        schedule,
        groups=tuple(
            msgspec.structs.replace(group, parameters=(f"decoder.layers.{number}.weight",))
            for number, group in enumerate(schedule.groups)
        ),
    )
    match_layers(named, len(schedule.groups))
    with pytest.raises(InputError, match="s.json: the schedule is for .* layers, the model has 3"):
        match_layers(named, 3, file="s.json")
