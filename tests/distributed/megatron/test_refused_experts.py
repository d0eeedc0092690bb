"""Schedules that say of experts what is not so are refused by group and field, before any process group is made."""

import random

import pytest
from draw_schedule import draw_schedule
from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule import match, validate
from megatron_ext.workload.workload import group_bytes


@pytest.fixture
def planned(workloads):
    """A workload and a schedule for it whose groups are of experts or of none."""
    work = replace(workloads["experts", "experts-fp32"], zero_stage=3)
    return work, draw_schedule(random.Random(2), work, routes=("gpu",))


def of_experts(schedule) -> int:
    return next(i for i, group in enumerate(schedule.groups) if any(".experts." in name for name in group.parameters))


def with_group(schedule, index: int, **changes):
    groups = list(schedule.groups)
    groups[index] = replace(groups[index], **changes)
    return replace(schedule, groups=tuple(groups))


def refused(schedule, workload) -> str:
    with pytest.raises(InputError) as error:
        match.match(validate.validate(schedule), workload)
    return str(error.value)


def test_experts_that_are_said_to_be_shared_by_the_data_parallel_ranks(planned):
    work, schedule = planned
    index = of_experts(schedule)
    said = refused(with_group(schedule, index, ranks=4), work)
    assert said == f"groups[{index}].ranks = 4: in the model these parameters are sharded among 2 ranks"
    said = refused(with_group(schedule, index, ranks=3), work)
    assert said.startswith(f"groups[{index}].ranks = 3: expected 4 data-parallel ranks or 2 expert-data-parallel")


def test_experts_in_a_group_of_dense_parameters(planned):
    work, schedule = planned
    index, place = of_experts(schedule), {p.name: n for n, p in enumerate(work.chunks[0].parameters)}
    dense = next(i for i, group in enumerate(schedule.groups) if not any(".experts." in n for n in group.parameters))
    taken, *left = schedule.groups[index].parameters
    assert left
    bytes_left = group_bytes([work.chunks[0].parameters[place[name]] for name in left], work.parallel)
    schedule = with_group(schedule, index, parameters=tuple(left), bytes=bytes_left)
    mixed = sorted([*schedule.groups[dense].parameters, taken], key=place.__getitem__)
    said = refused(with_group(schedule, dense, parameters=tuple(mixed)), work)
    assert said.startswith(f"groups[{dense}].parameters: mixes parameters of experts with others")


def test_dense_groups_alone_leave_experts_out(planned):
    """A model with another expert on each rank, and one whose layers were dense."""
    work, schedule = planned
    names = [f"{name}.of_another" for name in schedule.groups[of_experts(schedule)].parameters]
    (chunk,) = work.chunks
    last = [p for p in chunk.parameters if ".experts." in p.name][-1]
    more = [*chunk.parameters]
    more.insert(more.index(last) + 1, replace(last, name=names[0]))
    said = refused(schedule, replace(work, chunks=(replace(chunk, parameters=tuple(more)),)))
    assert said.startswith(f"groups = '{names[0]}': no group holds this parameter")
    dense = replace(chunk, parameters=tuple(p for p in chunk.parameters if ".experts." not in p.name))
    said = refused(schedule, replace(work, chunks=(dense,)))
    assert said.startswith("groups[") and "the model has no such parameter" in said


@pytest.mark.parametrize(("field", "there"), [("expert_model_parallel_size", 4), ("expert_tensor_parallel_size", 2)])
def test_other_sizes_of_experts(planned, field, there):
    """Experts would be on other ranks than the run's."""
    work, schedule = planned
    here = getattr(schedule.parallel, field) or 1
    with pytest.raises(InputError) as error:
        match.match_parallel(schedule, replace(work.parallel, **{field: there}), file="s.json")
    assert str(error.value) == f"s.json: parallel.{field} = {here}: the run has {there}"
