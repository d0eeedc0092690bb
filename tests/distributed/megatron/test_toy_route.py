"""A new route is said in one place for planning and in one for training; everything else asks there."""

import pytest
import toy_route
from cases import MODELS
from msgspec.structs import replace
from parity_service import differences
from planning_cases import make_table
from variations import some

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.random_plan import random_schedule
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate


def routes_of(schedule) -> set[str]:
    return {a.route for rank in schedule.ranks for entry in (rank.start, *rank.steps) for a in entry.unshard}


@pytest.mark.parametrize("zero_stage", some([3, 1], 1))
def test_a_route_that_is_added_is_planned_and_trains_bitwise(services, workloads, tmp_path, zero_stage):
    service, path = services("interleaved"), tmp_path / "schedule.json"
    workload = replace(workloads["interleaved", "fp32"], zero_stage=zero_stage)
    with toy_route.planned_with():
        schedule = random_schedule(workload, ("gpu", "cpu", toy_route.TOY.name), seed=3)
        schedule_file.save(path, schedule)
        assert "toy" in routes_of(validate.load(path))
    with pytest.raises(InputError, match="expected a route among gpu, cpu, cpu_shard, nvme, not 'toy'"):
        validate.load(path)
    answer = service.run(
        options=MODELS["fp32"], schedule=path, meddle="toy route", environment={"MEGATRON_EXT_DEBUG": "1"}
    )
    assert differences(answer) == []


def test_the_search_takes_the_cheaper_copy(workloads):
    workload = workloads["interleaved", "fp32"]
    table = make_table(workload, gpu=(20.0, 100.0), cpu=(20.0, 50.0))
    with toy_route.planned_with():
        assert routes_of(plan(workload, table, policy="hybrid")) == {"gpu", "toy"}
    assert routes_of(plan(workload, table, policy="hybrid")) == {"gpu", "cpu"}
