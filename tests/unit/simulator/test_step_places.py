"""The optimizer's step with states of some groups on the device, simulated."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.cost.cost_table import CAST_ON_DEVICE
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.group_facts import can_step_early, saved_bytes
from megatron_ext.schedule.user_defined_schedule import StepSlots
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.step_places import optimizer_us
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings

LAYERS, HOST_US, CAST_US, DEVICE_US, NORM_US = 4, 300.0, 240.0, 20.0, 50.0
COMPUTE_US = 2 * (400.0 + LAYERS * 200.0)


def case(on_device: int, *, early: bool = False, cast=None):
    """The host's step of a layer takes 300 us, or 240 with its parameters cast on the device; the device's 20. The
    first layers have their states there."""
    work = make_workload(pp=1, vp=1, microbatches=2, order="no_pipeline", layers=LAYERS, p2p_bytes=0)
    work = replace(work, optimizer=OptimizerSettings(on_host=True))
    schedule = stock_schedule(work, layer_buckets)
    size = schedule.groups[0].bytes
    host = replace(line(0.0, size / HOST_US), algorithms={CAST_ON_DEVICE: line(0.0, size / CAST_US).points})
    table = replace(
        make_table(work, gpu=(0.001, 1e9), forward=400.0, backward=LAYERS * 200.0),
        reduce=line(0.0, size / 1e-3),
        host_step=host,
        device_step=line(0.0, size / DEVICE_US),
        host_add=line(0.0, 1e9),
        optimizer=line(NORM_US, size / HOST_US),
    )
    groups = tuple(
        replace(group, states_rest="device" if index < on_device else None)
        for index, group in enumerate(schedule.groups)
    )
    slots = StepSlots(slots=2, slot_bytes=4 * size, cast=cast) if cast else None
    room = LAYERS * saved_bytes(schedule.groups[0], work) if early else None
    return work, table, validate(replace(schedule, groups=groups, step_slots=slots, rollback_bytes=room))


@pytest.mark.parametrize("on_device", range(LAYERS + 1))
def test_the_device_steps_its_groups_and_the_host_the_others(on_device):
    result = evaluate(*case(on_device))
    step_us = NORM_US + (LAYERS - on_device) * HOST_US + on_device * DEVICE_US
    assert result.iteration_time_us == pytest.approx(COMPUTE_US + step_us, rel=1e-3)
    assert result.lower_bound_us <= result.iteration_time_us and not result.left_out


def test_a_group_that_the_device_steps_is_not_stepped_beside_the_backward():
    """Layer 0, whose backward is last, is on the device; of the others the last to be reduced, layer 1, is stepped
    beside its 200 us, and half of it behind them."""
    work, table, schedule = case(1, early=True)
    assert [can_step_early(group, work) for group in schedule.groups] == [False, True, True, True]
    result = evaluate(work, table, schedule, trace=True)
    assert [event.name for event in result.events if event.lane == "host_step"] == ["3", "2", "at the end"]
    assert result.hidden_step_us == pytest.approx((2 * HOST_US,), rel=1e-3)
    assert result.iteration_time_us == pytest.approx(COMPUTE_US + NORM_US + HOST_US + DEVICE_US, rel=1e-3)


def test_the_place_of_the_cast_says_what_the_host_s_step_takes():
    """During the backward of 600 us begin two steps of 300 us, or three of 240."""
    for early, shorter in ((False, 3 * (HOST_US - CAST_US)), (True, HOST_US - (3 * CAST_US - 600.0))):
        times = {cast: evaluate(*case(1, early=early, cast=cast)).iteration_time_us for cast in ("host", "device")}
        assert times["host"] == evaluate(*case(1, early=early)).iteration_time_us
        assert times["host"] - times["device"] == pytest.approx(shorter, rel=1e-3)

    early = evaluate(*case(1, early=True, cast="device"))
    assert early.hidden_step_us == pytest.approx((3 * CAST_US,), rel=1e-3)


def test_the_device_s_step_is_not_hidden_by_steps_beside_the_backward():
    """Of groups as small as these the host's steps of single ones may take longer than one step of all."""
    work, table, schedule = case(1, early=True)
    result = evaluate(work, replace(table, optimizer=line(NORM_US, 1e9)), schedule)
    assert result.iteration_time_us == pytest.approx(COMPUTE_US + DEVICE_US, rel=1e-3)


def test_a_table_that_does_not_know_the_device_s_step_has_the_host_step_all():
    work, table, schedule = case(LAYERS)
    result = evaluate(work, replace(table, device_step=None), schedule)
    assert result.left_out == ("device_step",)
    assert result.iteration_time_us == pytest.approx(COMPUTE_US + NORM_US + LAYERS * HOST_US, rel=1e-3)


@pytest.mark.parametrize("gradients, shard_rests", [(None, None), ("host", None), ("host", "host")])
def test_a_step_on_the_device_has_its_gradients_and_shards_cross_to_the_host_and_back(gradients, shard_rests):
    work, table, schedule = case(0)
    work = replace(work, optimizer=OptimizerSettings())
    groups = tuple(replace(g, gradients=gradients, shard_rests=shard_rests) for g in schedule.groups)
    timing = Timing(work, table)
    ((whole_us, *_),) = optimizer_us(replace(schedule, groups=groups), work, timing)
    size, dp = schedule.groups[0].bytes, work.parallel.dp
    copies_us = (10.0 + 2 * size / dp / 5e3) * (gradients is not None) + (5.0 + size / 2e4) * (shard_rests is not None)
    assert whole_us == pytest.approx(timing.optimizer_us(work.chunks[0].bytes) + LAYERS * copies_us)
