"""Random schedules: always valid, wild, and the same for the same seed."""

import pytest
from planning_cases import make_table, make_workload
from variations import some

from megatron_ext.formats import json_files
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule.match import match
from megatron_ext.schedule.validate import validate

WORKLOADS = {
    "interleaved": dict(),
    "groups": dict(pp=2, vp=3, microbatches=7, group=5),
    "1f1b": dict(pp=4, vp=1, order="1f1b"),
    "no_pipeline": dict(pp=1, vp=1, order="no_pipeline"),
    "two dtypes": dict(dtypes=("bfloat16", "float32")),
    "nvme": dict(nvme_slots=2),
    "little host memory": dict(pinned_host_bytes=200_000),
    "zero 3": dict(zero_stage=3),
    "zero 3, one chunk fits": dict(zero_stage=3, whole_parameter_bytes=215_000, nvme_slots=1),
    "zero 3, one layer fits": dict(zero_stage=3, whole_parameter_bytes=100_000),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_seed_is_valid_and_simulates(name):
    work = make_workload(**WORKLOADS[name])
    table = make_table(work, nvme=(50.0, 2e3))
    for seed in some(range(25), 3):
        schedule = plan(work, table, policy=f"random:{seed}")
        match(validate(schedule), work)
        assert evaluate(work, table, schedule).iteration_time_us > 0


def test_a_seed_gives_the_same_bytes_and_another_seed_other_ones():
    work = make_workload()
    table = make_table(work)
    once, again, other = (json_files.encode(plan(work, table, policy=f"random:{seed}")) for seed in (7, 7, 8))
    assert once == again != other


def test_random_schedules_use_what_they_may():
    """Over a few seeds: both routes, single and shared groups, early issue and early need_by."""
    work = make_workload()
    table = make_table(work)
    routes, sizes, issued_early, needed_early = set(), set(), False, False
    for seed in range(10):
        schedule = plan(work, table, policy=f"random:{seed}")
        sizes |= {len(group.parameters) for group in schedule.groups}
        for rank in schedule.ranks:
            first = {}
            for index, entry in enumerate(rank.steps):
                first.setdefault(int(entry.step.split("F")[0].split("B")[0]) // work.parallel.pp, index)
            for index, actions in [(-1, rank.start.unshard), *enumerate(entry.unshard for entry in rank.steps)]:
                for action in actions:
                    routes.add(action.route)
                    need_by = index if action.need_by < 0 else action.need_by
                    issued_early |= index < need_by
                    needed_early |= need_by < first[schedule.groups[action.group].model_chunk_id]
    assert routes == {"gpu", "cpu"} and 1 in sizes and max(sizes) > 2 and issued_early and needed_early
