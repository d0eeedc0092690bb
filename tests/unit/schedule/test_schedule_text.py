"""The grid, and the arrow at the failing step."""

import msgspec
import pytest
from planning_cases import make_table, make_workload

from megatron_ext.planner import plan
from megatron_ext.schedule.schedule_text import ARROW, grid, summary
from megatron_ext.schedule.validate import InvalidSchedule, validate


def planned(**shape):
    work = make_workload(**shape)
    return plan(work, make_table(work), policy="all-gpu")


def test_grid_has_a_row_a_step_and_a_column_a_rank():
    text = grid(planned())
    lines = text.splitlines()
    assert "rank 0" in lines[0] and "rank 1" in lines[0]
    assert lines[1].split() == ["start", "+0g>0", "+2g>2", "+1g>0", "+3g>2"]
    assert lines[2].split() == ["0", "0F0", "1F0"] and len(lines) == 2 + 16


def test_actions_at_layers_are_shown():
    text = grid(planned(zero_stage=3, layers=3, whole_parameter_bytes=250_000))
    assert "+0g +1g +2g@1 -0@0 -1@1 -2@2" in text


def test_gathers_in_two_legs_are_told_apart():
    work = make_workload(dp=4, gpus_per_node=2)
    table = make_table(work)
    two_legs = msgspec.structs.replace(table.routes.gpu, algorithms={"hierarchical": table.routes.gpu.points})
    schedule = plan(
        work,
        msgspec.structs.replace(table, routes=msgspec.structs.replace(table.routes, gpu=two_legs)),
        policy="hierarchical",
    )
    assert "+0h" in grid(schedule) and "+0g" not in grid(schedule)
    assert "4 by hierarchical" in summary(schedule)


def test_arrow_marks_the_failing_step():
    schedule = planned(vp=1, order="1f1b")
    rank = schedule.ranks[1]
    broken = msgspec.structs.replace(rank, steps=(msgspec.structs.replace(rank.steps[0], unshard=()), *rank.steps[1:]))
    schedule = msgspec.structs.replace(schedule, ranks=(schedule.ranks[0], broken))
    with pytest.raises(InvalidSchedule) as caught:
        validate(schedule)
    lines = grid(schedule, caught.value).splitlines()
    assert [n for n, line in enumerate(lines[:-1]) if ARROW in line] == [2]
    assert lines[2].index(ARROW) > lines[2].index("0F0") and lines[2].endswith(f"{ARROW}1F0")
    assert "not whole" in lines[-1]


def test_long_schedules_are_cut_around_the_failure():
    schedule = planned(microbatches=128)
    assert "rows after" in grid(schedule) and "rows after" not in grid(schedule, every_row=True)
    error = InvalidSchedule("made up", pp_rank=0, step_index=400)
    text = grid(schedule, error)
    assert "rows before" in text and text.count(ARROW) == 2


def test_summary_says_where_optimizer_states_rest():
    schedule = planned()
    rests = (None, "device", "nvme", "nvme")
    groups = tuple(msgspec.structs.replace(g, states_rest=r) for g, r in zip(schedule.groups, rests, strict=True))
    text = summary(msgspec.structs.replace(schedule, groups=groups))
    assert "1 groups' optimizer states rest on the device" in text and "2 groups' optimizer states rest on the" in text
    assert "states rest" not in summary(schedule)


def test_summary_counts_routes():
    assert "4 by gpu" in summary(planned()) and "interleaved" in summary(planned())
