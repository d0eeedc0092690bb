"""The planner decides whether the host's optimizer steps during the backward."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.planner import delay, plan, policies, step_note, verdict
from megatron_ext.planner.baselines import all_cpu
from megatron_ext.planner.effort import judged_us
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.gain_interval import gain_interval
from megatron_ext.planner.passes import rest_states
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.group_facts import largest_region
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes
from megatron_ext.schedule.user_defined_schedule import StateSlots
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits


def case(save_rate: float = 1e5, **settings):
    """Two interleaved chunks a rank; the host's step of everything takes as long as a third of the compute."""
    work = replace(make_workload(layers=4), optimizer=OptimizerSettings(on_host=True, **settings))
    rank_bytes = sum(chunk.bytes for chunk in work.chunks_of_rank(0))
    table = make_table(work, gpu=(0.01, 1e7))
    rate = rank_bytes / 800.0
    curves = {"host_step": line(0.1, rate), "optimizer": line(5.0, rate), "host_add": line(0.01, save_rate)}
    return work, replace(table, reduce=line(0.1, 1e6), **curves)


def test_steps_go_beside_the_backward_where_that_is_faster():
    work, table = case()
    schedule = plan(work, table)
    assert schedule.rollback_bytes
    waits = evaluate(work, table, replace(schedule, rollback_bytes=None))
    assert schedule.predicted.iteration_time_us < 0.9 * waits.iteration_time_us
    assert schedule.predicted.lower_bound_us <= schedule.predicted.iteration_time_us
    assert f"{schedule.rollback_bytes} bytes of host memory" in step_note(schedule)
    more = evaluate(work, table, replace(schedule, rollback_bytes=2 * schedule.rollback_bytes))
    assert more.iteration_time_us == schedule.predicted.iteration_time_us  # as much memory as the steps take, no more


@pytest.mark.parametrize("zero_stage", (1, 3))
def test_no_plan_is_slower_than_all_gathers_alone_once_both_are_finished(monkeypatch, zero_stage):
    """Host copies of whole chunks end sooner than all-gathers by layer, but the steps of layers end sooner."""
    work, table = case()
    work = replace(work, zero_stage=zero_stage)
    costs = make_table(work, gpu=(0.01, 3e3), cpu=(1.0, 1e9), publish=(1e-3, 1e12))
    table = replace(table, routes=costs.routes, publish=costs.publish)
    whole = all_cpu(work)
    monkeypatch.setattr(policies, "search", lambda _: (whole, judged_us(work, Timing(work, table), whole)))
    monkeypatch.setattr(policies, "quick_schedules", lambda *_: [])
    schedule = plan(work, table)
    baselines_us = schedule.predicted.baselines_us
    assert min(baselines_us, key=baselines_us.get) == "all-cpu"
    assert schedule.metadata.options.rule == "urgency" and not schedule.publish
    assert schedule.predicted.iteration_time_us <= plan(work, table, policy="gathers-only").predicted.iteration_time_us


def test_steps_wait_where_that_is_faster_or_they_could_not_be_validated():
    work, table = case(save_rate=10.0)  # copies of states take longer than steps
    others = [case(gradient_dtype="bfloat16"), (work, table), (case()[0], replace(table, host_step=None))]
    for own, costs in others:
        schedule = plan(own, costs)
        assert schedule.rollback_bytes is None and step_note(schedule) is None


def test_the_limit_of_host_memory_bounds_the_copies_of_states():
    work, table = case()
    free = plan(work, table)
    taken = host_bytes_of_nodes(replace(free, rollback_bytes=None), work)[0]
    ranks = work.parallel.world_size
    limit = taken + ranks * free.rollback_bytes // 2
    work = replace(work, limits=replace(work.limits, host_bytes=limit))
    schedule = plan(work, table)
    assert 0 < schedule.rollback_bytes <= free.rollback_bytes // 2
    assert host_bytes_of_nodes(schedule, work)[0] <= limit
    assert schedule.predicted.iteration_time_us > free.predicted.iteration_time_us


def on_drive(schedule):
    return {index for index, group in enumerate(schedule.groups) if group.states_rest == "nvme"}


@pytest.mark.parametrize("part, slots", [(0.5, 0), (0.8, 2)])
def test_states_go_to_the_drive_so_that_others_have_room_to_be_stepped_beside_the_backward(monkeypatch, part, slots):
    """At 0.8 all states fit, but few copies beside them; that there is a drive then the staging slots say."""
    work, table = case()
    drive = make_table(work, gpu=(0.01, 1e7), nvme=(1.0, 1e4))
    limit = int(part * host_bytes_of_nodes(plan(work, table), work)[0])
    work = replace(work, limits=replace(work.limits, host_bytes=limit, nvme_slots=slots))
    fast = replace(table, routes=drive.routes, publish=drive.publish)
    slow = replace(fast, routes=replace(drive.routes, nvme=line(1e5, 1e4)))
    found, by_slow = plan(work, fast), plan(work, slow)
    monkeypatch.setattr(rest_states, "PARTS", ())
    least = plan(work, fast)
    assert host_bytes_of_nodes(found, work)[0] <= limit
    assert len(on_drive(least)) < len(on_drive(found))
    assert found.predicted.iteration_time_us < 0.97 * least.predicted.iteration_time_us
    assert found.rollback_bytes is not None
    assert len(on_drive(by_slow)) <= len(on_drive(least))  # a drive that takes longer than the step


def test_states_on_the_drive_are_those_that_are_reduced_first(monkeypatch):
    """Two chunks a rank, of which the last is reduced first: the drive has the backward of the other for its states."""
    monkeypatch.setattr(rest_states, "PARTS", (0.0,))  # as few as must be
    work, table = case()
    rank_bytes = sum(chunk.bytes for chunk in work.chunks_of_rank(0))
    drive = make_table(work, nvme=(1.0, rank_bytes / 500.0), publish=(1.0, rank_bytes / 500.0))
    table = replace(table, routes=replace(table.routes, nvme=drive.routes.nvme), publish=drive.publish)
    limit = int(0.6 * host_bytes_of_nodes(plan(work, table, policy="all-gpu"), work)[0])
    work = replace(work, limits=replace(work.limits, host_bytes=limit))
    schedule = plan(work, table)
    assert on_drive(schedule) and {schedule.groups[index].model_chunk_id for index in on_drive(schedule)} == {1}
    assert schedule.rollback_bytes is not None and host_bytes_of_nodes(schedule, work)[0] <= limit
    waits = evaluate(work, table, replace(schedule, rollback_bytes=None))
    assert schedule.predicted.iteration_time_us < waits.iteration_time_us
    chunks = [group.model_chunk_id for group in schedule.groups]
    last = [index for index, chunk in enumerate(chunks) if chunk == 0][: len(on_drive(schedule))]
    groups = tuple(replace(g, states_rest="nvme" if i in last else None) for i, g in enumerate(schedule.groups))
    other = evaluate(work, table, replace(schedule, groups=groups))
    assert schedule.predicted.iteration_time_us < other.iteration_time_us


def test_where_all_states_rest_on_the_drive_no_copy_is_needed():
    work, table = case()
    drive = make_table(work, nvme=(1.0, 1e4))
    table = replace(table, routes=replace(table.routes, nvme=drive.routes.nvme), publish=drive.publish)
    free = plan(work, table, policy="all-gpu")
    slots = StateSlots(slots=2, slot_bytes=max(largest_region(group, work) for group in free.groups))
    groups = tuple(replace(group, states_rest="nvme") for group in free.groups)
    least = replace(free, groups=groups, state_slots=slots, rollback_bytes=0)
    work = replace(work, limits=replace(work.limits, host_bytes=host_bytes_of_nodes(least, work)[0]))
    schedule = plan(work, table)
    assert on_drive(schedule) == {*range(len(schedule.groups))}
    assert schedule.rollback_bytes == 0 and "0 bytes of host memory" in step_note(schedule)
    waits = evaluate(work, table, replace(schedule, rollback_bytes=None))
    assert schedule.predicted.iteration_time_us < waits.iteration_time_us


def test_what_a_delay_would_bring_is_said_and_not_chosen():
    work, table = case()
    schedule = plan(work, table)
    found = delay(schedule, work, table)
    assert found.at_once_us == schedule.predicted.iteration_time_us > found.delayed_us
    delayed = replace(work, optimizer=replace(work.optimizer, delayed=True))
    planned = plan(delayed, table)
    assert planned.rollback_bytes is None
    assert (
        found.delayed_us
        == evaluate(delayed, table, replace(schedule, rollback_bytes=None, step_slots=None)).iteration_time_us
    )
    assert f"{found.delayed_us / 1e3:.1f} ms instead of" in found.text()
    assert "less), with" in found.text() and "it pays in time. It changes training, and loss was higher" in found.text()
    slower = found._replace(delayed_us=1.042 * found.at_once_us)
    assert "(4.2% more), with" in slower.text() and "it does not pay. It changes training" in slower.text()
    assert delay(schedule, work, replace(table, host_step=None)) is None


def test_delayed_updates_are_planned_and_compared_with_states_on_the_drive():
    """Megatron keeps all gradients, where a step at once has slots of the drive for them."""
    work, table = case()
    drive = make_table(work, gpu=(0.01, 1e7), nvme=(1.0, 1e3))
    table = replace(table, routes=drive.routes, publish=drive.publish)
    delayed = replace(work, optimizer=replace(work.optimizer, delayed=True))
    limit = int(0.8 * host_bytes_of_nodes(plan(delayed, table), delayed)[0])
    limits = replace(work.limits, host_bytes=limit)
    planned = plan(replace(delayed, limits=limits), table)
    assert on_drive(planned) and host_bytes_of_nodes(planned, delayed)[0] <= limit
    at_once = replace(planned, groups=tuple(replace(g, states_rest="nvme") for g in planned.groups))
    found = delay(at_once, work, table)
    chunks = work.chunks_of_rank(0)
    gradients = 4 * sum(p.numel for chunk in chunks for p in chunk.parameters) // work.parallel.dp
    assert found.delayed_us == evaluate(delayed, table, at_once).iteration_time_us < found.at_once_us
    assert 0.7 * gradients < found.host_bytes < gradients  # but for the rooms of the slots of a step at once


def test_what_a_plan_is_compared_with_steps_as_the_plan_does():
    """With all-gathers alone the plan by all routes is the one that it is compared with, so it gains nothing."""
    work = replace(
        make_workload(layers=4, zero_stage=3, pp=1, vp=1, order="no_pipeline"),
        optimizer=OptimizerSettings(on_host=True),
    )
    rate = sum(chunk.bytes for chunk in work.chunks_of_rank(0)) / 800.0
    curves = {"host_step": line(0.1, rate), "optimizer": line(5.0, rate), "host_add": line(0.01, 1e5)}
    table = replace(make_table(work, gpu=(0.01, 1e7)), reduce=line(0.1, 1e6), **curves)
    for limit in (None, 1 << 30):
        limited = replace(work, limits=Limits(device_bytes=limit))
        schedule = plan(limited, table)
        assert schedule.rollback_bytes and plan(limited, table, policy="gathers-only").rollback_bytes
        figures = verdict(limited, table, schedule).figures
        assert figures["gain_on_table"] == pytest.approx(0.0, abs=1e-3) and figures["answer"] == "does not help"


def test_a_plan_that_gains_by_steps_beside_the_backward_alone_gains():
    """Stock Megatron's own gathers, but steps during the backward: another plan than stock's."""
    work, table = case()
    planned = plan(work, table)
    stock = replace(stock_schedule(work), rollback_bytes=planned.rollback_bytes)
    stock = replace(stock, predicted=planned.predicted)
    assert gain_interval(work, table, stock, replace(stock, rollback_bytes=None)).low > 0
