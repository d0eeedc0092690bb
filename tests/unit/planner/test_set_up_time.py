"""What a plan says of the time before its first step."""

from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.cost.cost_table import SetUp
from megatron_ext.planner.policies import plan
from megatron_ext.planner.set_up_time import set_up_line

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
