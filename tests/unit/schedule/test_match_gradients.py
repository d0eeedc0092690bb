"""What a schedule says of gradients: accepted where it can be, refused in one line where not, shown."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.schedule.match import match
from megatron_ext.schedule.schedule_text import summary
from megatron_ext.schedule.validate import validate


def planned(zero_stage):
    work = make_workload(zero_stage=zero_stage, microbatches=4)
    return work, plan(work, make_table(work), policy="all-gpu")


def with_first(schedule, **gradients):
    first, *others = schedule.groups
    return replace(schedule, groups=(replace(first, **gradients), *others))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_every_group_says_what_it_keeps_of_its_gradients(zero_stage):
    work, schedule = planned(zero_stage)
    schedule = with_first(schedule, gradients="sharded", reduce_every=4)
    match(validate(schedule), work)
    assert "gradients sharded: 1 groups, reduced every 4 backward steps" in summary(schedule)
    assert "gradients host: 1 groups" in summary(validate(with_first(schedule, gradients="host", reduce_every=1)))


@pytest.mark.parametrize("wrong", [dict(gradients="sharded", reduce_every=0), dict(gradients="host", reduce_every=5)])
def test_reduces_lie_within_the_iteration(wrong):
    with pytest.raises(InputError, match=r"groups\[0\].reduce_every = [05]: expected 1 to 4, the backward steps"):
        validate(with_first(planned(2)[1], **wrong))


def test_whole_gradients_are_reduced_once():
    with pytest.raises(InputError, match=r"groups\[0\].reduce_every = 2: gradients that stay whole"):
        validate(with_first(planned(3)[1], reduce_every=2))


def test_only_gradients_that_come_and_go_are_allocated_alone():
    with pytest.raises(InputError, match=r"groups\[0\].alone = True: gradients that stay whole are allocated once"):
        validate(with_first(planned(2)[1], alone=True))


def test_zero_stage_1_keeps_gradients_whole():
    with pytest.raises(InputError, match=r"groups\[0\].gradients = 'sharded': zero stage 1 keeps whole gradients"):
        validate(with_first(planned(1)[1], gradients="sharded"))


def test_an_embedding_that_two_pipeline_ranks_share_stays_whole():
    work = make_workload(zero_stage=2)
    first, *others = work.chunks
    shared = (replace(first.parameters[0], shared_embedding=True), *first.parameters[1:])
    work = replace(work, chunks=(replace(first, parameters=shared), *others))
    schedule = plan(work, make_table(work), policy="all-gpu")
    own = next(n for n, group in enumerate(schedule.groups) if group.parameters == (shared[0].name,))
    groups = tuple(replace(g, gradients="host") if n == own else g for n, g in enumerate(schedule.groups))
    with pytest.raises(InputError, match=rf"groups\[{own}\].gradients = 'host': the group keeps its gradient whole"):
        match(replace(schedule, groups=groups), work)
