"""Gradients that come and go: reduced at every visit, in order with all-gathers, copied to and added on the host."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.group_facts import gradient_bytes
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.step_places import AROUND_ADD
from megatron_ext.workload.bucket_rules import layer_buckets

LAYERS, COMPUTE = 4, dict(forward=400.0, backward=800.0)


def case(kept, *, reduce_us, publish_us=10.0, add_us=0.0, every=1, microbatches=3, dp=2):
    """Equal layers; reducing one takes ``reduce_us``, copying its gradient to the host ``publish_us``."""
    work = make_workload(
        pp=1, vp=1, dp=dp, microbatches=microbatches, order="no_pipeline", layers=LAYERS, zero_stage=2, p2p_bytes=0
    )
    schedule = stock_schedule(work, layer_buckets)
    groups = tuple(replace(group, gradients=kept, reduce_every=every) for group in schedule.groups)
    size, gradient = groups[0].bytes, gradient_bytes(groups[0], work)
    # Gradients come back from the host for the optimizer in no time.
    table = make_table(work, gpu=(0.001, 1e9), cpu=(0.001, 1e9), publish=(0.0, gradient / publish_us), **COMPUTE)
    table = replace(table, reduce=line(0.0, size / reduce_us))
    if add_us:
        table = replace(table, host_add=line(0.0, gradient / dp / add_us))
    return work, table, validate(replace(schedule, groups=groups))


def simulated(kept, **costs):
    work, table, schedule = case(kept, **costs)
    return evaluate(work, table, schedule, trace=True)


def count(result, lane):
    return sum(event.lane == lane for event in result.events)


@pytest.mark.parametrize("every, reduces", ((1, 3), (2, 2), (3, 1)))
def test_a_gradient_is_reduced_after_so_many_backward_steps_and_after_the_last(every, reduces):
    result = simulated("sharded", reduce_us=50.0, every=every)
    assert count(result, "reduce") == reduces * LAYERS
    assert result.iteration_time_us == pytest.approx(3 * 1200.0 + 50.0, rel=1e-3)  # hidden but for the last


def test_the_thread_waits_for_the_reduce_before():
    """A layer is reduced in 500 us while the next one's backward takes 200: every reduce but the first of a backward is
    waited for; the last of one is hidden behind the next forward's 400."""
    expected = 3 * 400.0 + 3 * (200.0 + (LAYERS - 1) * 500.0) + 500.0
    assert simulated("sharded", reduce_us=500.0).iteration_time_us == pytest.approx(expected, rel=1e-3)
    whole = simulated(None, reduce_us=500.0)
    assert whole.iteration_time_us == pytest.approx(3 * 1200.0 - 600.0 + LAYERS * 500.0, rel=1e-3)


def test_before_a_gradient_is_allocated_alone_the_reduce_before_is_waited_for():
    """A reduce of 50 us then hides behind nothing but the next forward."""
    work, table, schedule = case("sharded", reduce_us=50.0)
    schedule = validate(replace(schedule, groups=tuple(replace(group, alone=True) for group in schedule.groups)))
    result = evaluate(work, table, schedule)
    assert result.iteration_time_us == pytest.approx(3 * 1200.0 + 3 * (LAYERS - 1) * 50.0 + 50.0, rel=1e-3)
    (bill,) = result.memory
    assert bill.memory.device_bytes["gradients"] == gradient_bytes(schedule.groups[0], work)


def test_what_the_host_adds_is_copied_first_and_waited_for_at_the_end():
    """Then each sum is normed, clipped and zeroed: once more 4/3 of adding it."""
    around = AROUND_ADD * LAYERS
    hidden = simulated("host", reduce_us=50.0, publish_us=30.0, add_us=20.0)
    assert hidden.iteration_time_us == pytest.approx(3 * 1200.0 + 100.0 + around * 20.0, rel=1e-3)
    assert count(hidden, "publish") == 3 * LAYERS and "host_add" not in hidden.left_out
    # Reduce and copy together take longer than a layer's backward; the whole gradient is there until both have ended.
    slow = simulated("host", reduce_us=250.0, publish_us=250.0, add_us=20.0)
    expected = 3 * 400.0 + 3 * (200.0 + (LAYERS - 1) * 500.0) + 500.0 + 20.0 + around * 20.0
    assert slow.iteration_time_us == pytest.approx(expected, rel=1e-3)
    # The host is the slowest: it adds one gradient after another.
    adding = simulated("host", reduce_us=5.0, publish_us=5.0, add_us=900.0)
    assert adding.iteration_time_us == pytest.approx(600.0 + (3 * LAYERS + around) * 900.0, rel=1e-2)
    assert "host_add" in simulated("host", reduce_us=5.0).left_out


def test_one_rank_copies_its_gradients_without_reducing():
    work, table, schedule = case("host", reduce_us=1.0, publish_us=100.0, add_us=10.0, dp=1)
    result = evaluate(work, replace(table, reduce=None), schedule, trace=True)
    assert count(result, "publish") == 3 * LAYERS
    assert result.iteration_time_us == pytest.approx(3 * 1200.0 + 110.0 + AROUND_ADD * LAYERS * 10.0, rel=1e-3)


def test_reduces_and_all_gathers_follow_each_other_on_one_communicator():
    """Zero stage 3: what is gathered behind a reduce waits for it."""
    work, table, _ = case("sharded", reduce_us=600.0)
    free = replace(work, zero_stage=3)
    schedule = stock_schedule(free, layer_buckets)
    groups = tuple(replace(group, gradients="sharded") for group in schedule.groups)
    both = evaluate(free, table, validate(replace(schedule, groups=groups)), trace=True)
    ends = {lane: [(e.end_us, e.duration_us) for e in both.events if e.lane == lane] for lane in ("gpu", "reduce")}
    least = {lane: min(us for _, us in found) for lane, found in ends.items()}  # of the first gather, alone
    busy = sorted((end, least[lane]) for lane, found in ends.items() for end, _ in found)
    assert all(first + us <= end + 1e-6 for (first, _), (end, us) in zip(busy, busy[1:]))
    alone = evaluate(free, table, schedule)
    assert sum(both.exposed_us) > sum(alone.exposed_us) + 300.0
    assert both.lower_bound_us <= both.iteration_time_us
