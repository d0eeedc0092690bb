"""Host memory is a link: what moves bytes in it at once shares it. Runs of one H200 from its sheet alone."""

import h200_runs
import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.planner.what_limits import limit_of
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.activity_kinds import CPU, HOST_STEP
from megatron_ext.simulator.host_memory_link import HostMemoryLink
from megatron_ext.simulator.rank_programs import RankProgram
from megatron_ext.simulator.rank_state import Activity, RankState
from megatron_ext.simulator.step_places import AROUND_ADD
from megatron_ext.workload.bucket_rules import layer_buckets

WORK = make_workload(pp=1, vp=1, dp=1, layers=4, order="no_pipeline", zero_stage=2, microbatches=3, p2p_bytes=0)
GROUP = sum(parameter.bytes for parameter in WORK.chunks[0].parameters) // 4
COPY_US, ADD_US, BACKWARD_US = 300.0, 300.0, 40.0


def hosted(bytes_per_us: float | None):
    """Gradients of four layers are copied to the host and added there, one after another, each as long as a copy."""
    schedule = stock_schedule(WORK, layer_buckets)
    groups = tuple(replace(group, gradients="host") for group in schedule.groups)
    gradient = 2 * GROUP
    table = make_table(
        WORK,
        publish=(0.0, gradient / COPY_US),
        forward=40.0,
        backward=4 * BACKWARD_US,
        host_add=line(0.0, gradient / ADD_US),
        host_memory=None if bytes_per_us is None else cost.HostMemory(bytes_per_s=1e6 * bytes_per_us),
    )
    return evaluate(WORK, table, validate(replace(schedule, groups=groups)), trace=True)


def test_copies_and_additions_share_host_memory():
    """A copy writes a gradient, an addition moves three times as many bytes in the same time. Where memory carries
    just that, both run as fast as alone; where it carries half, each takes twice as long beside the other."""
    asked = 2 * GROUP / COPY_US + 3 * 2 * GROUP / ADD_US
    free, enough, half = (hosted(rate).iteration_time_us for rate in (None, asked, asked / 2))
    assert enough == pytest.approx(free, rel=1e-6)
    around = 4 * AROUND_ADD * ADD_US  # behind the backward
    assert half - around == pytest.approx(2 * (free - around), rel=0.1)
    events = hosted(asked / 2).events or ()
    lanes = {lane: [e.duration_us for e in events if e.lane == lane] for lane in ("publish", "host_add")}
    assert len(lanes["publish"]) == len(lanes["host_add"]) == 12
    assert max(lanes["publish"]) == pytest.approx(2 * COPY_US, rel=0.01)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"bytes_per_s": 0.0}, "host_memory.bytes_per_s"),
        ({"bytes_per_s": 1e9, "slow_bytes_per_s": 2e9}, "host_memory.slow_bytes_per_s"),
    ],
)
def test_host_memory_of_no_bandwidth_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        cost.check(replace(make_table(WORK), host_memory=cost.HostMemory(**given)))


def test_what_waits_for_a_drive_takes_what_it_needs_and_the_others_share_the_rest():
    """A step moves 30 bytes in a microsecond in the mean; while it does not wait, ``slack`` times as many."""
    link, rank = HostMemoryLink(WORK, 100.0), RankState(RankProgram(0))

    def speed(copied: float, slack: float) -> float:
        given = ((CPU, copied, 1.0), (HOST_STEP, 30.0, slack))
        return link.speed([Activity(rank, kind, 1, 1.0, 0.0, None, memory, by) for kind, memory, by in given])

    assert speed(120.0, 4.0) == pytest.approx(70.0 / 120.0)  # four times that is more than it needs
    assert speed(120.0, 1.25) == pytest.approx(100.0 / (120.0 + 1.25 * 30.0))
    assert speed(60.0, 4.0) == 1.0


@pytest.mark.parametrize("name, on_host", [("stock", False), ("stock, optimizer on the host", True)])
def test_runs_of_one_h200_are_predicted_within_a_tenth(name, on_host):
    assert h200_runs.predicted_ms(on_host=on_host) == pytest.approx(h200_runs.measured_ms(name), rel=0.1)


def test_how_long_host_memory_is_full_is_what_a_plan_calls_its_limit():
    asked = 2 * GROUP / COPY_US + 3 * 2 * GROUP / ADD_US
    full, enough = hosted(asked / 2).busy_us, hosted(2 * asked).busy_us
    assert "host_memory" not in enough and full["host_memory"] > 0.8 * full["publish"]
    assert limit_of(full, hosted(asked / 2).iteration_time_us) == "host_memory"
