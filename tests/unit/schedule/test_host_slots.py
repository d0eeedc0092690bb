"""Slots of the host's step: what they replace in the memory bill, and what is refused."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.schedule.group_facts import largest_gradient
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.user_defined_schedule import Schedule, StateSlots, StepSlots, read_unchecked, save
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings

SLOTS, SLOT_BYTES = 3, 1 << 20


def planned(**slots):
    """A schedule with slots, and its workload: a model of two parameters a layer, bf16, two replicas."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", hidden=64, layers=4)
    work = replace(work, optimizer=OptimizerSettings(on_host=True))
    how: dict = {"slots": SLOTS, "slot_bytes": SLOT_BYTES, "cast": "host"} | slots
    return replace(plan(work, make_table(work)), step_slots=StepSlots(**how)), work


def held(schedule: Schedule, work):
    return memory_bill(schedule, work)[0].memory


def test_a_file_holds_them(tmp_path):
    schedule, _ = planned()
    save(tmp_path / "s.json", schedule)
    assert read_unchecked(tmp_path / "s.json") == schedule


@pytest.mark.parametrize(
    ("cast", "gradient_dtype", "more", "on_device"),
    [
        ("host", "float32", SLOT_BYTES // 2, 0),
        ("device", "float32", 0, SLOT_BYTES * 3 // 2),
        ("device", "bfloat16", 0, SLOT_BYTES * 5 // 2),
    ],
)
def test_slots_take_the_place_of_all_gradients(cast, gradient_dtype, more, on_device):
    schedule, work = planned(cast=cast)
    work = replace(work, optimizer=OptimizerSettings(on_host=True, gradient_dtype=gradient_dtype))
    match(validate(schedule), work)
    without = held(replace(schedule, step_slots=None), work)
    bill = held(schedule, work)
    # Megatron's copy of the gradients: as many bytes as the fp32 parameters.
    assert without.host_bytes["gradients"] == without.host_bytes["main_parameters"]
    assert "gradients" not in bill.host_bytes
    assert bill.host_bytes["main_parameters"] == without.host_bytes["main_parameters"]
    assert bill.host_bytes["staging_slots"] == SLOTS * (SLOT_BYTES + more)
    assert bill.device_bytes.get("buffers", 0) == on_device
    assert bill.device_total_bytes - without.device_total_bytes == on_device


def test_gradients_that_rest_in_host_memory_stay():
    schedule, work = planned()
    schedule = replace(schedule, zero_stage=2, groups=tuple(replace(g, gradients="host") for g in schedule.groups))
    work = replace(work, zero_stage=2)
    whole = sum(group.bytes for group in schedule.groups) // 2 * 4
    assert held(schedule, work).host_bytes["gradients"] == whole // 2


def test_beside_states_on_the_drive_only_the_others_pass_through_them():
    schedule, work = planned()
    groups = (replace(schedule.groups[0], states_rest="nvme"), *schedule.groups[1:])
    moved = replace(schedule, groups=groups, state_slots=StateSlots(slots=2, slot_bytes=3 << 20))
    match(validate(moved), work)
    bill = held(moved, work)
    assert bill.host_bytes["staging_slots"] == SLOTS * SLOT_BYTES * 3 // 2 + 2 * (4 << 20)
    assert "gradients" not in bill.host_bytes
    every = replace(moved, groups=tuple(replace(group, states_rest="nvme") for group in moved.groups))
    with pytest.raises(InputError, match="step_slots: no group's states are in host memory"):
        validate(every)


@pytest.mark.parametrize(
    ("how", "field"), [({"slots": 1}, "slots"), ({"slot_bytes": 100}, "slot_bytes"), ({"slot_bytes": 0}, "slot_bytes")]
)
def test_slots_that_cannot_be_are_refused(how, field):
    schedule, _ = planned(**how)
    with pytest.raises(InputError, match=f"step_slots.{field} = {next(iter(how.values()))}: expected"):
        validate(schedule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (OptimizerSettings(), "the optimizer steps on the device"),
        (OptimizerSettings(on_host=True, delayed=True), "cannot be combined with --delayed-parameter-update"),
    ],
)
def test_an_optimizer_that_steps_elsewhere_or_later_is_refused(settings, message):
    schedule, work = planned()
    with pytest.raises(InputError, match=f"step_slots: .*{message}"):
        match(schedule, replace(work, optimizer=settings))


def test_a_slot_holds_the_gradient_of_one_parameter():
    schedule, work = planned()
    need = max(largest_gradient(group, work) for group in schedule.groups)
    slots = schedule.step_slots
    assert slots is not None
    match(replace(schedule, step_slots=replace(slots, slot_bytes=need)), work)
    small = replace(schedule, step_slots=replace(slots, slot_bytes=need - 64))
    with pytest.raises(InputError, match=f"step_slots.slot_bytes = {need - 64}: group .* needs {need} bytes"):
        match(small, work)
    # States on the drive have slots of their own.
    chosen = tuple(replace(g, states_rest="nvme" if largest_gradient(g, work) == need else None) for g in small.groups)
    assert any(group.states_rest is None for group in chosen)
    match(replace(small, groups=chosen, state_slots=StateSlots(slots=2, slot_bytes=1 << 20)), work)
