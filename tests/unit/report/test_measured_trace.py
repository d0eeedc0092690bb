"""Reading a measured trace iteration by iteration."""

import pytest
from msgspec.structs import replace
from planning_cases import make_workload
from run_files import EPOCH_US, OPTIMIZER_US, PERIOD_US, STEP_US, change, make_events

from megatron_ext.formats import trace as traces
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.trace import Event
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.workload.step_order import steps_of_ranks

MEASURED = {"kind": "measured"}
PARALLEL = make_workload().parallel


def saved(path, events=None, about=MEASURED, **changes):
    if events is None:
        settings = {"issue_us": lambda i, rank: i + 10.0 * rank, "wait_us": lambda i, rank: 5.0 * (3 - rank), **changes}
        events = make_events(PARALLEL, 4, **settings)
    traces.save(path / "t.json", events, about=about)
    return path / "t.json"


def test_thread_time_is_that_of_the_largest_rank(tmp_path):
    trace = MeasuredTrace(saved(tmp_path), PARALLEL, 4)
    # The publishing issue inside the optimizer step takes 1 us more.
    assert trace.thread_us(("issue",)) == [i + 30.0 + 1.0 for i in range(1, 5)]
    assert trace.thread_us(("wait",)) == [15.0] * 4
    # The largest sum, not the sum of the largest: rank 3 issues for 30 + i and waits for none.
    assert trace.thread_us(("issue", "wait")) == [i + 30.0 + 1.0 for i in range(1, 5)]


def test_launches_are_those_of_the_slowest_thread_and_no_part_of_a_window(tmp_path):
    """Which device is behind its thread is seen by when it begins the optimizer's step."""
    events = make_events(PARALLEL, 4, issue_us=lambda i, rank: 1.0, wait_us=lambda i, rank: 0.0)
    plain = MeasuredTrace(saved(tmp_path, events), PARALLEL, 4)
    assert plain.launches(range(2, 4)) is None
    for at_once, behind_us in ((True, 500.0), (False, 5000.0)):
        own = [
            Event(e.rank, "launches", "steps", e.start_us - behind_us * (e.rank == 1) - took, took, e.iteration)
            for e in events
            if e.lane == "optimizer"
            for took in (20.0 + e.iteration + 7.0 * e.rank,)
        ]
        trace = MeasuredTrace(saved(tmp_path, events + own), PARALLEL, 4)
        assert trace.launches(range(2, 4)) == (20.0 + 3.5 + 7.0 * 3, at_once)
        assert trace.window(3) == plain.window(3) and trace.periods_us() == plain.periods_us()


def test_what_follows_the_optimizer_step_is_no_training(tmp_path):
    plain = MeasuredTrace(saved(tmp_path), PARALLEL, 4)
    evaluated = MeasuredTrace(saved(tmp_path, evaluated=2), PARALLEL, 4)
    assert evaluated.thread_us(("issue", "wait")) == plain.thread_us(("issue", "wait"))
    assert [evaluated.evaluated_before(i) for i in range(1, 5)] == [False, False, True, False]
    assert not any(plain.evaluated_before(i) for i in range(1, 5))
    assert set(plain.periods_us()) == {2, 3, 4} and set(evaluated.periods_us()) == {2, 4}
    assert plain.periods_us()[3] == pytest.approx(PERIOD_US + 1.0)  # each iteration issues 1 us longer


def test_a_window_holds_one_iteration_from_fresh_parameters(tmp_path):
    window = MeasuredTrace(saved(tmp_path), PARALLEL, 4).window(3)
    of_rank = [e for e in window.events if e.rank == 2]
    lanes = [e.lane for e in of_rank]
    assert lanes.count("optimizer") == 1 and lanes.count("gpu") == 1
    # What was published for this iteration lies in it, whichever number its thread wrote down.
    assert lanes.count("publish") == 1 and lanes.count("wait") == 1
    # The issue that published, and the issue of the iteration itself.
    assert [e.name for e in of_rank if e.lane == "issue"] == ["publish", "unshard 0 gpu"]
    assert [e.name for e in of_rank if e.lane == "compute"] == [str(step) for step in steps_of_ranks(PARALLEL)[1]]
    assert min(e.start_us for e in window.events) == 0.0
    assert window.end_us == max(e.start_us + e.duration_us for e in window.events if e.lane == "optimizer")


def test_an_iteration_takes_as_long_where_clocks_of_nodes_differ(tmp_path):
    """Ranks 2 and 3 are on a node whose clock is 50 ms ahead."""
    events = make_events(PARALLEL, 4, issue_us=lambda i, rank: 1.0, wait_us=lambda i, rank: 0.0)
    ahead = [event._replace(start_us=event.start_us + 5e4 * (event.rank > 1)) for event in events]
    nodes = replace(PARALLEL, gpus_per_node=2)
    plain, other = (MeasuredTrace(saved(tmp_path, each), nodes, 4) for each in (events, ahead))
    assert other.iteration_us(3) == plain.iteration_us(3)
    assert other.window(3).end_us > plain.window(3).end_us + 4e4  # these are drawn on one axis


def test_the_first_window_begins_with_the_trace(tmp_path):
    window = MeasuredTrace(saved(tmp_path), PARALLEL, 4).window(1)
    steps = len(steps_of_ranks(PARALLEL)[0])
    assert window.end_us == pytest.approx(PERIOD_US + 31.0 + steps * STEP_US + OPTIMIZER_US)
    assert any(e.name == "publish" and e.start_us == 0.0 for e in window.events)


def test_without_an_issue_in_it_the_optimizer_step_ends_before_the_window(tmp_path):
    events = [
        e for e in make_events(PARALLEL, 4, issue_us=lambda i, r: 1.0, wait_us=lambda i, r: 1.0) if e.name != "publish"
    ]
    window = MeasuredTrace(saved(tmp_path, events), PARALLEL, 4).window(3)
    assert [e.iteration for e in window.events if e.lane == "optimizer"] == [3] * 4


def refused(path, iterations=4, parallel=PARALLEL) -> str:
    with pytest.raises(InputError) as caught:
        MeasuredTrace(path, parallel, iterations)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_other_iterations_or_ranks_are_refused(tmp_path):
    path = saved(tmp_path)
    assert "1 to 5" in refused(path, iterations=5)
    assert "1 to 3" in refused(path, iterations=3)
    assert "ranks 0 to 7" in refused(path, parallel=make_workload(dp=4).parallel)
    assert "[]" in refused(saved(tmp_path, []))


def test_a_simulated_trace_is_refused(tmp_path):
    assert "simulated" in refused(saved(tmp_path, about={"kind": "simulated"}))


def test_steps_in_another_order_are_refused(tmp_path):
    more = make_workload(microbatches=8).parallel
    assert "not those of the workload" in refused(saved(tmp_path), parallel=more)
    events = make_events(PARALLEL, 4, issue_us=lambda i, r: 1.0, wait_us=lambda i, r: 1.0)
    swapped = [
        e._replace(name="FB"["BF".index(e.name)]) if e.lane == "compute" and (e.rank, e.iteration) == (3, 2) else e
        for e in events
    ]
    assert "iteration 2 of rank 3" in refused(saved(tmp_path, swapped))


def test_two_optimizer_steps_in_one_iteration_are_refused(tmp_path):
    events = make_events(PARALLEL, 4, issue_us=lambda i, r: 1.0, wait_us=lambda i, r: 1.0)
    twice = [*events, Event(1, "optimizer", "step", EPOCH_US, 1.0, 2)]
    assert "more than one optimizer step in iteration 2 of rank 1" in refused(saved(tmp_path, twice))


@pytest.mark.parametrize(
    ("field", "value"),
    [("dur", -1), ("dur", "1"), ("tid", 99), ("pid", None), ("args", {"iteration": "1"}), ("args", [])],
)
def test_a_damaged_row_is_named(tmp_path, field, value):
    path = saved(tmp_path)
    change(path, lambda trace: trace["traceEvents"][-1].update({field: value}))
    assert field in refused(path)
