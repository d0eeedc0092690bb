"""What a plan says of the time before its first step."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.cost.cost_table import SetUp
from megatron_ext.planner.policies import plan
from megatron_ext.planner.set_up_time import never_whole_line, set_up_line
from megatron_ext.schedule.memory_bill import copies_of_whole

WORK = make_workload()


def test_time_is_told_for_the_host_copies_of_a_node():
    table = make_table(WORK, cpu=(0.1, 1e6))
    planned = plan(WORK, table, policy="all-cpu")
    assert set_up_line(planned, WORK, table) is None  # it was not measured
    measured = replace(table, set_up=SetUp(pages_us_per_gib=2e6 * 2**30, pin_us_per_gib=3e6 * 2**30))
    copies = sum(chunk_bytes(WORK))
    line = set_up_line(planned, WORK, measured)
    assert line is not None and f"about {2 * copies:.3g} s to make their pages" in line
    assert f"{3 * copies:.3g} s to page-lock them on every rank" in line
    assert set_up_line(plan(WORK, table, policy="all-gpu"), WORK, measured) is None  # no host copies


def chunk_bytes(work) -> list[int]:
    return [parameter.bytes for chunk in work.chunks for parameter in chunk.parameters]


@pytest.mark.parametrize(("room", "host_bytes", "words"), [(0, None, None), (-1, 1, "more than limits.host_bytes")])
def test_what_it_takes_that_parameters_never_fit_whole_is_said(room, host_bytes, words):
    work = make_workload(zero_stage=3, whole_parameter_bytes=100_000, layers=4)
    schedule = plan(work, make_table(work), policy="random:3")
    whole = [sum(group.bytes for group in schedule.groups if group.pp_rank == rank) for rank in range(2)]
    need = [
        memory.device_total_bytes - memory.device_bytes["whole_parameters"] + size
        for memory, size in zip(schedule.predicted.memory, whole)
    ]
    limited = replace(schedule, limits=replace(schedule.limits, device_bytes=max(need) + room))
    copies = copies_of_whole(limited)
    assert [size > 0 for size in copies] == [size > max(need) + room for size in need]
    line = never_whole_line(limited, replace(work, limits=replace(work.limits, host_bytes=host_bytes)))
    assert (line is None) == (words is None)
    assert line is None or (words in line and f"copies of {work.parallel.dp * sum(copies)} bytes" in line)
