"""The executor runs a program beside the steps: groups are whole where layers use them, and disorder is an error."""

import pytest
from one_rank import OneRank
from planning_cases import make_table, make_workload

from megatron_ext.planner import plan
from megatron_ext.runtime.group import GroupState, ScheduleError
from megatron_ext.runtime.part import Part
from megatron_ext.schedule.footprint import device_peaks

SHAPES = {
    "zero 1": dict(),
    "zero 3": dict(zero_stage=3),
    "zero 3, one layer at a time": dict(zero_stage=3, whole_parameter_bytes=100_000),
    "1f1b": dict(vp=1, order="1f1b", zero_stage=3),
    "no pipeline": dict(pp=1, vp=1, order="no_pipeline", zero_stage=3),
}


def rank_of(policy: str = "random:3", **shape) -> OneRank:
    work = make_workload(**shape)
    return OneRank(plan(work, make_table(work), policy=policy), work)


@pytest.mark.parametrize("policy", ["all-gpu", "random:3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_finds_its_groups_whole_and_fresh_within_the_promised_bytes(shape, policy):
    rank = rank_of(policy, **SHAPES[shape])
    for _ in range(3):
        rank.iteration()  # its layers check
        if rank.schedule.zero_stage == 3:
            assert rank.executor.peak_bytes == device_peaks(rank.schedule)[0]
        rank.executor.params_updated()
    assert rank.executor.iterations == 3 and rank.clock.version == 4


def test_a_group_of_the_last_optimizer_step_is_not_computed_on():
    rank = rank_of("all-gpu")
    rank.executor.begin_iteration()
    rank.clock.version += 1  # as if nobody had told the executor
    with pytest.raises(ScheduleError, match="parameters are at 2"):
        rank.iteration()


def test_steps_out_of_order_are_refused():
    rank = rank_of()
    rank.executor.begin_iteration()
    with pytest.raises(ScheduleError, match="Megatron runs forward 0 of chunk 1, which the schedule does not expect"):
        rank.executor.pre_forward(0, 1)
    with pytest.raises(ScheduleError, match="Megatron runs backward 1 of chunk 1"):
        rank.executor.pre_backward(1, 1)


def test_an_iteration_that_ends_early_or_has_other_micro_batches_is_refused():
    rank = rank_of(microbatches=4)
    rank.executor.expect(4)
    with pytest.raises(ScheduleError, match="the iteration has 2 micro-batches, but the schedule has 4"):
        rank.executor.expect(2)
    rank.executor.begin_iteration()
    rank.executor.pre_forward(0, 0)
    with pytest.raises(ScheduleError, match="ended after 1 forwards and 0 backwards; the schedule has 8 and 8"):
        rank.executor.end_iteration()


def test_unshard_all_brings_every_group_and_the_next_iteration_begins_anew():
    rank = rank_of(zero_stage=3)
    rank.executor.params_updated()  # what the schedule issues ahead is on its way
    rank.executor.unshard_all()
    assert {group.state for group in rank.groups.values()} == {GroupState.WHOLE}
    for group in rank.groups.values():
        group.check_usable(rank.clock)
    rank.iteration()
    assert {group.state for group in rank.groups.values()} == {GroupState.SHARDED}


def test_parameters_that_were_changed_from_outside_become_the_shards():
    rank = rank_of(zero_stage=3)
    rank.executor.unshard_all()
    for group in rank.groups.values():
        group.whole.data.fill_(7.0)
    rank.executor.params_changed()
    assert rank.clock.version == 2
    assert all((group.shard == 7.0).all() for group in rank.groups.values())
    issued = len(rank.events)
    rank.executor.begin_iteration()
    assert len(rank.events) == issued, "what was issued behind the change is not issued again"


def test_an_iteration_that_is_run_again_gathers_behind_what_its_parts_take_back():
    """Megatron's rerun machinery runs an iteration again without a step: early steps of the host are taken back."""
    rank, part, called = rank_of(), Part(), []
    rank.executor.program = rank.program._replace(start=(lambda: called.append("gathers"), *rank.program.start))
    rank.executor.parts, part.begin = (part,), lambda: called.append("takes back")
    rank.iteration()
    rank.iteration()
    assert called == 2 * ["takes back", "gathers"]


def test_who_watches_sees_every_step_and_nothing_between_iterations():
    rank = rank_of()
    assert rank.executor.progress() is None
    rank.executor.begin_iteration()
    before = rank.executor.progress()
    rank.executor.pre_forward(0, 0)
    assert rank.executor.progress() != before
    assert rank.executor.where().startswith("iteration 1 of this schedule: 1 of 8 forwards have begun")


def test_what_was_opened_last_is_closed_first():
    rank, closed = rank_of(), []
    rank.executor.on_close(lambda: closed.append("pool"), lambda: closed.append("route"))
    rank.executor.close()
    rank.executor.close()
    assert closed == ["route", "pool"]
