"""The planner decides whether gradients pass to the host's optimizer through slots, and where parameters are cast."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.cost.cost_table import CAST_ON_DEVICE
from megatron_ext.planner import plan
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, memory_bill
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits


def case(cast_rate: float = 2000.0, **limits):
    """The host's step of a byte takes half a nanosecond, and with parameters cast on the device as told."""
    work = make_workload(layers=4)
    work = replace(work, optimizer=OptimizerSettings(on_host=True), limits=Limits(**limits))
    step = replace(line(0.1, 2000.0), algorithms={CAST_ON_DEVICE: line(0.1, cast_rate).points})
    curves = {"host_step": step, "optimizer": line(5.0, 2000.0), "host_add": line(0.01, 1e5)}
    return work, replace(make_table(work, gpu=(0.01, 1e7)), reduce=line(0.1, 1e6), **curves)


def peak(schedule, work):
    return max(bill.memory.device_total_bytes for bill in memory_bill(schedule, work))


@pytest.mark.parametrize(("cast_rate", "cast"), [(1000.0, "host"), (4000.0, "device")])
def test_slots_take_less_host_memory_and_parameters_are_cast_where_that_is_faster(cast_rate, cast):
    work, table = case(cast_rate)
    schedule = plan(work, table)
    assert schedule.step_slots.cast == cast
    without = replace(schedule, step_slots=None)
    assert host_bytes_of_nodes(schedule, work)[0] < host_bytes_of_nodes(without, work)[0]


def test_parameters_are_cast_on_the_device_only_where_a_slot_has_room_there():
    work, table = case(4000.0)
    schedule = plan(work, table)
    least = peak(replace(schedule, step_slots=None), work)
    for limit, cast in ((peak(schedule, work), "device"), (least, "host")):
        limited = replace(work, limits=Limits(device_bytes=limit))
        found = plan(limited, table)
        assert found.step_slots.cast == cast and peak(found, work) <= limit


def test_without_a_step_on_the_host_there_are_no_slots():
    work, table = case()
    delayed = replace(work, optimizer=replace(work.optimizer, delayed=True))
    on_device = replace(work, optimizer=OptimizerSettings())
    for own, costs in ((delayed, table), (on_device, table), (work, replace(table, host_step=None))):
        assert plan(own, costs).step_slots is None
    tiny = make_workload(pp=1, vp=1, order="no_pipeline", layers=1)  # four slots hold more than all gradients
    costs = replace(make_table(tiny), host_step=table.host_step, optimizer=table.optimizer)
    assert plan(replace(tiny, optimizer=work.optimizer), costs).step_slots is None


@pytest.mark.parametrize(("part", "slots"), [(0.7, 4), (0.4, 2), (0.12, None)])
def test_where_host_memory_is_short_there_are_few_slots_or_none(part, slots):
    """Slots that take more than they save are none: of few states in host memory, or of none."""
    work, table = case()
    drive = make_table(work, gpu=(0.01, 1e7), nvme=(1.0, 1e3))
    table = replace(table, routes=drive.routes, publish=drive.publish)
    limit = int(part * host_bytes_of_nodes(plan(work, table), work)[0])
    found = plan(replace(work, limits=Limits(host_bytes=limit)), table)
    assert host_bytes_of_nodes(found, work)[0] <= limit
    assert any(group.states_rest == "nvme" for group in found.groups) == (slots != 4)
    assert (found.step_slots and found.step_slots.slots) == slots
    if slots:
        assert host_bytes_of_nodes(found, work) < host_bytes_of_nodes(replace(found, step_slots=None), work)
