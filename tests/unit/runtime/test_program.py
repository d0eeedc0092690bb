"""What a schedule is compiled into: the right calls at the right steps and layers, and none elsewhere."""

import pytest
from msgspec.structs import replace
from negative_controls import without_group
from one_rank import OneRank
from planning_cases import make_table, make_workload

from megatron_ext.planner import plan
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.runtime.group import GroupState, ScheduleError
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.footprint import actions_in_order
from megatron_ext.workload.step import Step


def planned(**shape):
    work = make_workload(**shape)
    return plan(work, make_table(work), policy="random:5"), work


def issued(schedule) -> list[tuple[str, int]]:
    """Unshards of rank 0 in the order of the file."""
    rank = schedule.ranks[0]
    actions = [*rank.start.unshard, *(action for entry in rank.steps for action in actions_in_order(entry))]
    return [("unshard", action.group) for action in actions if hasattr(action, "route")]


@pytest.mark.parametrize("shape", [dict(), dict(zero_stage=3), dict(zero_stage=3, whole_parameter_bytes=100_000)])
def test_groups_are_unsharded_in_the_order_of_the_file(shape):
    schedule, work = planned(**shape)
    rank = OneRank(schedule, work)
    rank.iteration()
    assert rank.events == issued(schedule) != []


def test_steps_are_those_of_the_schedule_and_most_have_nothing_to_do():
    schedule, work = planned()  # zero stage 1: every group comes once
    program = OneRank(schedule, work).program
    steps = [Step.parse(entry.step) for entry in schedule.ranks[0].steps]
    chunks = {kind: [step.model_chunk_id(schedule.parallel.pp) for step in steps if step.kind == kind] for kind in "FB"}
    assert [chunk for chunk, _ in program.forwards] == chunks["F"]
    assert [chunk for chunk, *_ in program.backwards] == chunks["B"]
    assert all(before == behind == () for _, before, behind in program.backwards)


def test_a_group_is_waited_for_at_the_layer_that_uses_it_first_and_not_before():
    schedule, work = planned(zero_stage=3, whole_parameter_bytes=100_000)
    rank = OneRank(schedule, work)
    rank.executor.begin_iteration()
    rank.executor.pre_forward(0, 0)
    later = [
        index for index in rank.groups if schedule.groups[index].model_chunk_id == 0 and rank.layers.uses(index)[0]
    ]
    assert later and rank.layers.armed
    for index in later:
        with pytest.raises(ScheduleError, match="computes on group"):
            rank.groups[index].check_usable(rank.clock)


def test_the_negative_control_leaves_one_group_out():
    schedule, work = planned()
    skipped = issued(schedule)[0][1]
    without = without_group(schedule.ranks[0], skipped)
    rank = OneRank(replace(schedule, ranks=(without, *schedule.ranks[1:])), work)
    with pytest.raises(ScheduleError, match=f"computes on group {skipped} "):
        rank.iteration()
    assert ("unshard", skipped) not in rank.events


def test_the_debug_mode_checks_every_use_by_itself():
    """The program's own check, not that of the layers here, stops a group that is old."""
    schedule, work = planned()
    rank = OneRank(schedule, work, check_uses=True)
    rank.executor.begin_iteration()
    rank.executor.pre_forward(0, 0)
    for group in rank.groups.values():
        group.drop()
    with pytest.raises(ScheduleError, match="computes on group"):
        rank.executor.pre_forward(1, 0)


def test_actions_are_recorded_by_name_where_a_recorder_listens():
    schedule, work = planned(zero_stage=3)
    recorder = Recorder(0)
    rank = OneRank(schedule, work, recorder=recorder)
    rank.iteration()
    names = [event.name.split()[0] for event in recorder.events()]
    entries = [schedule.ranks[0].start, *schedule.ranks[0].steps]
    assert names.count("unshard") == names.count("wait") == sum(len(entry.unshard) for entry in entries)
    assert names.count("reshard") == sum(len(entry.reshard) for entry in schedule.ranks[0].steps)


def test_a_group_that_is_needed_later_stays_on_its_way_until_then():
    work = make_workload()
    schedule = all_gpu(work)
    rank = OneRank(schedule, work)
    rank.executor.begin_iteration()
    ahead = {action.group: action.need_by for action in schedule.ranks[0].start.unshard if action.need_by > 0}
    assert ahead
    rank.executor.pre_forward(0, 0)
    assert {rank.groups[group].state for group in ahead} == {GroupState.UNSHARDING}
    rank.executor.pre_forward(1, 0)
    rank.layers.armed = []
    rank.executor.pre_forward(2, 1)
    for _, forward, _ in rank.layers.armed:
        for action in forward:
            action()
    assert {rank.groups[group].state for group in ahead} == {GroupState.WHOLE}
