"""The host's step during the backward and during the next iteration, simulated: what it hides, what waits, and what it
takes in memory."""

import pytest
from early_step_cases import LAYER_US, LAYERS, NORM_US, ON_HOST, case, on_drive
from msgspec.structs import replace
from planning_cases import line

from megatron_ext.cost.cost_table import HostMemory
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule.group_facts import can_step_early, saved_bytes
from megatron_ext.schedule.user_defined_schedule import PublishGroup
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.host_memory_link import STEP_BYTES
from megatron_ext.simulator.step_places import delayed_steps
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks


def simulated(*args, **how):
    work, table, schedule = case(*args, **how)
    return evaluate(work, table, schedule, trace=True)


COMPUTE_US = 2 * (400.0 + LAYERS * LAYER_US)


@pytest.mark.parametrize("gradients", [None, "sharded"])
def test_all_but_the_last_layers_step_is_hidden(gradients):
    result = simulated(150.0, save_us=20.0, gradients=gradients)
    assert result.iteration_time_us == pytest.approx(COMPUTE_US + 170.0 + NORM_US, rel=1e-3)
    assert result.hidden_step_us == pytest.approx((4 * 150.0,), rel=1e-3)
    assert [event.name for event in result.events if event.lane == "host_step"] == ["3", "2", "1", "0"]
    assert result.lower_bound_us <= result.iteration_time_us


def test_a_step_that_has_not_begun_when_everything_is_reduced_waits_for_the_norm():
    """Two steps of 500 us begin while three layers' backwards of 200 us go on."""
    result = simulated(500.0)
    assert result.iteration_time_us == pytest.approx(COMPUTE_US - 600.0 + 2 * 500.0 + 2 * 500.0 + NORM_US, rel=1e-3)
    assert result.hidden_step_us == pytest.approx((1000.0,), rel=1e-3)


def test_memory_for_the_states_from_before_bounds_what_is_stepped():
    some = simulated(100.0, groups=2.9)
    assert some.hidden_step_us == pytest.approx((200.0,), rel=1e-3)
    assert some.iteration_time_us == pytest.approx(COMPUTE_US + 200.0 + NORM_US, rel=1e-3)
    work, _, schedule = case(100.0, groups=2.9)
    assert some.early_bytes == (2 * saved_bytes(schedule.groups[0], work),)
    assert some.memory[0].memory.host_bytes["previous_states"] == schedule.rollback_bytes


def test_compute_and_the_host_s_step_disturb_each_other():
    """The step of 150 us beside three layers of 200: each takes half as long again."""
    pairs = [("compute", "host_step", 1.5), ("host_step", "compute", 1.2)]
    slowed = simulated(150.0, contention=pairs)
    assert slowed.iteration_time_us == pytest.approx(COMPUTE_US + 3 * 60.0 + 150.0 + NORM_US, rel=1e-3)


def test_a_table_without_the_host_s_step_has_everything_wait():
    work, table, schedule = case(150.0)
    waits = evaluate(work, replace(table, host_step=None), schedule)
    assert waits.hidden_step_us == ()
    assert waits.iteration_time_us == pytest.approx(COMPUTE_US + 600.0 + NORM_US, rel=1e-3)


@pytest.mark.parametrize("read_us, write_us", [(60.0, 40.0), (120.0, 60.0), (300.0, 200.0)])
def test_states_on_the_drive_are_read_stepped_and_written_beside_the_backward(read_us, write_us):
    """A layer takes the longer of the step, 150 us, and the drive. At 500 us two begin in three layers' backwards."""
    work, table, schedule = on_drive(read_us, write_us)
    waits, result = (
        evaluate(work, table, replace(schedule, rollback_bytes=r), extrapolate=True, trace=True) for r in (None, 0)
    )
    for each in (waits, result):
        busy = {lane: sum(e.duration_us for e in each.events if e.lane == lane) for lane in ("host_step", "nvme")}
        assert busy == pytest.approx({"host_step": LAYERS * 150.0, "nvme": LAYERS * (read_us + write_us)}, rel=1e-3)
        assert each.busy_us["nvme"] == pytest.approx(busy["nvme"])
    drive_us = read_us + write_us
    at_end = max(LAYERS * 150.0 + NORM_US, LAYERS * drive_us)
    assert waits.iteration_time_us == pytest.approx(COMPUTE_US + at_end, rel=1e-3)
    longest = max(150.0, drive_us)
    left = COMPUTE_US + longest + NORM_US if longest <= LAYER_US else COMPUTE_US - 600.0 + 4 * longest
    assert result.iteration_time_us == pytest.approx(left, rel=1e-3)
    hidden = at_end - (NORM_US if longest <= LAYER_US else 2 * longest)
    assert result.hidden_step_us == pytest.approx((hidden,), rel=2e-3) and result.early_bytes == (0,)
    assert result.lower_bound_us <= result.iteration_time_us


@pytest.mark.parametrize("slower, us", [(1.0, 500.0), (2.0, 500.0), (3.6, 540.0)])
@pytest.mark.parametrize("by", ["contention", "host memory"])
def test_a_step_that_waits_for_the_drive_is_slowed_as_far_as_it_does_not_wait(by, slower, us):
    """The drive takes 500 us, the step 150 alone, or 540 where that is slowed 3.6 times."""
    rows = [("host_step", "compute", slower)] if by == "contention" else []
    work, table, schedule = on_drive(300.0, 200.0, contention=[*rows, ("compute", "host_step", 1.5)])
    if by == "host memory":
        asked = schedule.groups[0].bytes * STEP_BYTES / 2 / work.parallel.dp / 150.0
        table = replace(table, host_memory=HostMemory(bytes_per_s=1e6 * asked / slower))
    events = evaluate(work, table, schedule, extrapolate=True, trace=True).events or ()
    steps, drive = ([event for event in events if event.lane == lane] for lane in ("host_step", "nvme"))
    assert steps[1].start_us - steps[0].start_us == pytest.approx(us)
    assert steps[0].duration_us == pytest.approx(150.0 * us / 500.0)
    assert [event.duration_us for event in drive] == pytest.approx([500.0] * (LAYERS - 2) + [1000.0])
    backward = [event.duration_us for event in events if event.name == "0B1"]
    assert sum(backward) == pytest.approx(200.0 + 600.0 * (1 + 0.5 * 150.0 / 500.0))


def test_what_the_drive_need_not_do_at_the_end_is_spared_for_its_own_groups_alone():
    """Two groups in memory without room for copies wait; the drive has done its part of the two others."""
    work, table, schedule = on_drive(300.0, 200.0, groups=[2, 3])
    result = evaluate(work, table, schedule, extrapolate=True)
    assert result.iteration_time_us == pytest.approx(COMPUTE_US - 600.0 + 2 * 500.0 + 2 * 150.0 + NORM_US, rel=1e-3)


def test_groups_whose_gradient_changes_later_or_whose_states_are_on_the_device_wait():
    work, _, schedule = case(150.0)
    group = schedule.groups[0]
    assert can_step_early(group, work)
    assert not can_step_early(replace(group, states_rest="device"), work)
    assert can_step_early(replace(group, states_rest="nvme"), work)
    assert saved_bytes(replace(group, states_rest="nvme"), work) == 0 < saved_bytes(group, work)
    (chunk,) = work.chunks
    tied = replace(chunk, parameters=(replace(chunk.parameters[0], shared_embedding=True), *chunk.parameters[1:]))
    assert not can_step_early(group, replace(work, chunks=(tied,)))
    parallel = replace(work.parallel, tensor_model_parallel_size=2)
    assert not can_step_early(group, replace(work, parallel=parallel))  # it holds a norm's vector
    assert len(steps_of_ranks(work.parallel)[0]) == 4


@pytest.mark.parametrize("step_us", [300.0, 1000.0])
def test_a_delayed_step_is_made_beside_the_next_iteration(step_us):
    """Hidden as far as it is shorter than the compute; the copies of gradients and parameters stay."""
    work, table, schedule = case(step_us)
    waits = evaluate(work, table, replace(schedule, rollback_bytes=None))
    schedule, work = replace(schedule, rollback_bytes=None), replace(work, optimizer=replace(ON_HOST, delayed=True))
    result = evaluate(work, table, schedule, trace=True)
    (step,) = delayed_steps(work, Timing(work, table, extrapolate=True))
    assert step.us > 0.9 * LAYERS * step_us and NORM_US < step.rest_us < NORM_US + 0.2 * LAYERS * step_us
    assert result.iteration_time_us == pytest.approx(max(COMPUTE_US, step.us) + step.rest_us, rel=1e-3)
    assert result.hidden_step_us[0] == pytest.approx(waits.iteration_time_us - result.iteration_time_us, rel=1e-3)
    assert [event.name for event in result.events if event.lane == "host_step"] == ["delayed"]
    assert result.memory[0].memory.host_bytes == waits.memory[0].memory.host_bytes


def test_a_delayed_step_takes_as_long_as_its_states_pass_to_the_drive_and_back():
    work, table, schedule = case(300.0)
    timing = Timing(replace(work, optimizer=replace(ON_HOST, delayed=True)), table, extrapolate=True)
    (in_memory,) = delayed_steps(timing.workload, timing)
    (hidden,) = delayed_steps(timing.workload, timing, [0.5 * in_memory.us])
    (drive,) = delayed_steps(timing.workload, timing, [2.0 * in_memory.us])
    assert (hidden.us, drive.us) == (in_memory.us, 2.0 * in_memory.us) and drive.rest_us == in_memory.rest_us


def test_a_delayed_step_waits_for_publishing_and_disturbs_compute():
    pairs = [("compute", "host_step", 1.5)]
    work, table, schedule = case(150.0, contention=pairs)
    work = replace(work, optimizer=replace(ON_HOST, delayed=True))
    published = tuple(PublishGroup(group=index, to=("cpu",)) for index in range(LAYERS))
    schedule = validate(replace(schedule, rollback_bytes=None, publish=published))
    result = evaluate(work, table, schedule, trace=True)
    (step,) = [event for event in result.events if event.lane == "host_step"]
    assert step.start_us == pytest.approx(max(e.start_us + e.duration_us for e in result.events if e.lane == "publish"))
    (alone,) = delayed_steps(work, Timing(work, table, extrapolate=True))
    assert result.iteration_time_us == pytest.approx(COMPUTE_US + alone.us / 3 + alone.rest_us, rel=1e-3)


def test_a_step_that_begins_when_an_addition_in_host_memory_ends_runs_too():
    """Additions go on when nothing else runs any more. The host steps behind each of the last ones, and the rest at the
    end."""
    work, table, schedule = case(150.0, gradients="host")
    table = replace(table, host_add=line(0.0, 2 * schedule.groups[0].bytes / work.parallel.dp / 900.0))
    result = evaluate(work, table, schedule, trace=True)
    steps = [event for event in result.events if event.lane == "host_step" and event.name != "at the end"]
    added = [event.start_us + event.duration_us for event in result.events if event.lane == "host_add"]
    assert len(added) == 2 * LAYERS and steps and all(any(s.start_us == a for a in added[LAYERS:]) for s in steps[:1])
    (optimizer,) = [event for event in result.events if event.lane == "optimizer"]
    assert optimizer.start_us >= max(added[-1], *(step.start_us + step.duration_us for step in steps))
    assert result.iteration_time_us == pytest.approx(optimizer.start_us + optimizer.duration_us)
