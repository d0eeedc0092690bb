"""When links carry bytes, and all of them at once."""

import dataclasses

import pytest
from msgspec.structs import replace
from parallel_sizes import sized
from planning_cases import make_workload
from run_files import change, make_run

from megatron_ext import report
from megatron_ext.formats.facts import CAUTION
from megatron_ext.formats.trace import END_NOT_KNOWN, LANES, Event
from megatron_ext.report import report_text
from megatron_ext.report.links_busy import AT_ONCE, in_all, moving, shares, union
from megatron_ext.schedule.user_defined_schedule import Group, MeasuredOn

PARALLEL = make_workload(pp=2, vp=1, dp=2, order="1f1b").parallel


def gathers_of(events: list[Event], rank: int) -> list[tuple[float, float]]:
    return sorted((event.start_us, event.end_us) for event in events if (event.rank, event.lane) == (rank, "gpu"))


def test_intervals_that_touch_are_one():
    assert union([(4, 6), (0, 2), (2, 3), (5, 5.5)]) == [(0, 3), (4, 6)]


def test_time_in_all_lists():
    assert in_all([[(0, 3), (4, 9)], [(1, 5)], [(2, 8)]]) == [(2, 3), (4, 5)]
    assert in_all([[(0, 3)], [(3, 5)]]) == []


def test_an_all_gather_counts_from_when_its_last_rank_has_issued_it():
    """Ranks 0 and 1 gather together, ranks 2 and 3; the second gather of a group is not the first one."""
    gathers = [(0, 10.0, 30.0), (1, 25.0, 15.0), (0, 60.0, 20.0), (1, 50.0, 30.0), (2, 0.0, 90.0), (3, 5.0, 85.0)]
    events = [Event(rank, "gpu", "unshard 0", begin, us) for rank, begin, us in gathers]
    events += [Event(rank, lane, "unshard 1", 20.0, 50.0) for rank in range(4) for lane in ("cpu", "nvme", "compute")]
    events.append(Event(0, "gpu", END_NOT_KNOWN, 0.0, 100.0))
    moved = moving(events, PARALLEL)
    assert gathers_of(moved, 0) == gathers_of(moved, 1) == [(25.0, 40.0), (60.0, 80.0)]
    assert gathers_of(moved, 2) == gathers_of(moved, 3) == [(5.0, 90.0)]
    # The iteration ends before the last gather. All links at once: 25 to 40 and 60 to 70 us, on the others 20 to 70 us.
    assert shares(moved, 75.0) == pytest.approx(
        {"gpu": (30 + 70) / 2 / 75, "cpu": 50 / 75, "nvme": 50 / 75, AT_ONCE: (25 + 50) / 2 / 75}
    )
    # One link alone is not at once with any other; one that no rank uses does not count.
    assert shares([e for e in moved if e.lane == "gpu"], 75.0) == {}
    two = shares([e for e in moved if e.lane != "nvme"], 75.0)
    assert list(two) == ["gpu", "cpu", AT_ONCE]


def test_a_pause_before_the_iteration_is_no_part_of_the_whole():
    """In it ranks log and evaluate; what links carry then is not in the simulated iteration either."""
    events = [Event(0, lane, "unshard 0", begin, 20.0) for lane in ("cpu", "nvme") for begin in (10.0, 90.0, 130.0)]
    found = shares(moving(events, PARALLEL), 200.0, begin_us=100.0)
    assert found == pytest.approx({"cpu": 0.3, "nvme": 0.3, AT_ONCE: 0.3})


def test_a_report_s_measured_shares_are_of_the_iteration_time(tmp_path):
    make_run(tmp_path)

    def add_copies(trace) -> None:
        rows = trace["traceEvents"]
        rows += [row | {"tid": LANES.index("cpu")} for row in rows if row.get("tid") == LANES.index("gpu")]

    change(tmp_path / "scheduled.trace.json", add_copies)
    found = report.build(report.load(tmp_path)).links_busy["measured"]
    assert found["cpu"] > 0.01  # 20 of 1,004 us; the period is 10,000


def test_ranks_that_share_experts_gather_them_together():
    """Of four ranks with EP 2, ranks 0 and 2 hold the same experts, ranks 1 and 3 others."""
    parallel = sized(dp=4, ep=2, microbatches=2)
    groups = [Group(pp_rank=0, model_chunk_id=0, parameters=("w",), bytes=1, ranks=ranks) for ranks in (4, 2)]
    begins = (10.0, 20.0, 30.0, 40.0)
    for name, since in (("0", (40.0,) * 4), ("unshard 1", (30.0, 40.0, 30.0, 40.0))):
        events = [Event(rank, "gpu", name, begin, 90.0 - begin) for rank, begin in enumerate(begins)]
        moved = moving(events, parallel, groups)
        assert tuple(gathers_of(moved, rank)[0][0] for rank in range(4)) == since


def test_a_report_says_both(tmp_path):
    """What was measured has all-gathers alone, so it has no such line; the simulation of other routes has one."""
    make_run(tmp_path)
    built = report.build(report.load(tmp_path))
    assert built.links_busy["measured"] == {} and set(built.links_busy) == {"measured", "simulated"}
    found = {"gpu": 0.5, "cpu": 0.25, AT_ONCE: 0.2}
    built = built._replace(links_busy={"measured": found, "simulated": {}})
    line = "carry bytes, measured: gpu 50%, cpu 25%, all at once 20% of the iteration"
    assert line in report_text.as_text(built, width=200) and line in report_text.as_markdown(built)
    assert report_text.as_json(built)["links_busy"]["measured"] == found


def test_a_report_says_what_figures_are_not(tmp_path):
    make_run(tmp_path)
    built = report.build(report.load(tmp_path))
    metadata = built.run.schedule.metadata
    assert "EMULATED links" not in report_text.cautions(built)
    options = replace(metadata.options, measured_on=MeasuredOn(hardware={"device": "cpu", CAUTION: "EMULATED links"}))
    schedule = replace(built.run.schedule, metadata=replace(metadata, options=options))
    built = built._replace(run=dataclasses.replace(built.run, schedule=schedule))
    assert report_text.cautions(built)[0] == "EMULATED links"
