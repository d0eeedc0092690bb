"""Optimizer states on the drive: as few as the host's limit asks for, and what is refused."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.bounds.host_room import optimizer_on_host
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.states_on_drive import FEW_SLOTS, STATE_SLOTS, with_states_on_drive
from megatron_ext.schedule.group_facts import gradient_bytes, largest_gradient, largest_region
from megatron_ext.schedule.host_slots import narrow_gradient_bytes
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, memory_bill
from megatron_ext.schedule.rest_checks import check_rests
from megatron_ext.schedule.user_defined_schedule import StateSlots
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.state_layout import GRADIENT_SLOTS
from megatron_ext.workload.workload import Limits, Parameter


def on_host(layers=12, pp=1, order="no_pipeline", **limits):
    work = make_workload(pp=pp, vp=1, dp=2, order=order, microbatches=8, hidden=64, layers=layers, **limits)
    return replace(work, optimizer=OptimizerSettings(on_host=True))


def table(work, optimizer_us=10.0):
    return make_table(work, nvme=(50.0, 1e3), optimizer=line(optimizer_us, 1e9))


def planned(part: float | None):
    """A plan with ``part`` of the host memory that it takes without a limit, and its workload."""
    work = on_host()
    free = plan(work, table(work))
    if part is None:
        return free, work
    limit = int(part * host_bytes_of_nodes(free, work)[0])
    work = replace(work, limits=replace(work.limits, host_bytes=limit))
    return plan(work, table(work)), work


def test_states_stay_in_memory_where_there_is_room():
    for part in (None, 1.0):
        schedule, _ = planned(part)
        assert schedule.state_slots is None and all(group.states_rest is None for group in schedule.groups)


def test_as_few_states_as_the_limit_asks_for_go_to_the_drive():
    numbers = []
    for part in (0.9, 0.7, 0.5):
        schedule, work = planned(part)
        assert host_bytes_of_nodes(schedule, work)[0] <= work.limits.host_bytes
        numbers.append(sum(group.states_rest == "nvme" for group in schedule.groups))
        assert memory_bill(schedule, work)[0].memory.nvme_bytes > 0
    assert numbers == sorted(numbers) and numbers[0] < numbers[-1]


def test_what_goes_to_the_drive_leaves_the_host_but_for_the_slots():
    free, work = planned(None)
    schedule, _ = planned(0.5)
    before, after = (memory_bill(s, work)[0].memory for s in (free, schedule))
    assert after.host_bytes["optimizer_states"] < before.host_bytes["optimizer_states"]
    slots = schedule.state_slots
    # Beside three tensors of a parameter its gradient passes through a slot, and is in no other host memory.
    assert after.host_bytes["staging_slots"] == slots.slots * slots.slot_bytes * 4 // 3
    assert after.host_bytes["gradients"] < before.host_bytes["gradients"]
    hosted = replace(schedule, groups=tuple(replace(g, gradients="host") for g in schedule.groups))
    # Gradients in host memory come through slots of their own, and there is a room beside each slot all the same.
    own = [gradient_bytes(group, work) // 2 for group in hosted.groups if group.pp_rank == 0]
    through = memory_bill(hosted, work)[0].memory.host_bytes["staging_slots"]
    assert through == after.host_bytes["staging_slots"] + GRADIENT_SLOTS * max(own)


def test_reads_and_writes_make_the_optimizer_step_longer_by_what_they_take():
    schedule, work = planned(0.5)
    nbytes, piece = memory_bill(schedule, work)[0].memory.nvme_bytes, schedule.state_slots.slot_bytes
    read_us = 50.0 + piece / 1e3 - (10.0 + piece / 5e3)  # the drive's route without its copy to the device
    write_us = 5.0 + work.parallel.dp * piece / 2e4  # a piece is the shard of a larger group
    drive_us = nbytes / piece * (read_us + write_us)
    times = [evaluate(work, table(work, us), schedule).iteration_time_us for us in (1.0, 2 * drive_us)]
    assert times[1] - times[0] == pytest.approx(drive_us, rel=0.1)


def test_a_drive_that_was_not_measured_is_left_out_and_said():
    schedule, work = planned(0.5)
    result = evaluate(work, make_table(work), schedule)
    assert {"routes.nvme", "publish.nvme"} <= set(result.left_out)


def test_a_limit_that_cannot_be_kept_says_what_is_short():
    with pytest.raises(
        InputError,
        match=r"host_bytes = .* host memory \(.*slots .*states on the drive, \d+ bytes short; with fewer ranks",
    ):
        planned(0.05)
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", host_bytes=1000)
    assert host_bytes_of_nodes(plan(work, table(work)), work) == [0]  # without host copies
    with pytest.raises(InputError, match="without --optimizer-cpu-offload"):
        with_states_on_drive(plan(replace(work, limits=Limits()), table(work), policy="all-cpu"), work)


def test_the_largest_states_stay_in_memory_where_slots_for_them_take_more():
    """A vocabulary: its states once take less than slots as large, through which those of the layers would pass."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", hidden=64, layers=12)
    (chunk,) = work.chunks
    vocabulary = Parameter(name="embedding", shape=(1 << 16, 64), dtype="float32", bytes=1 << 24, layer=0)
    chunk = replace(chunk, parameters=(vocabulary, *chunk.parameters))
    work = replace(work, chunks=(chunk,), optimizer=OptimizerSettings(on_host=True))
    (in_memory,), (least,) = (optimizer_on_host(work, on_drive=on_drive) for on_drive in (False, True))
    limit = int(0.95 * in_memory)
    assert least < limit
    work = replace(work, limits=Limits(host_bytes=limit))
    schedule = plan(work, table(work))
    rests = {name: group.states_rest for group in schedule.groups for name in group.parameters}
    assert rests["embedding"] is None and "nvme" in rests.values()
    assert host_bytes_of_nodes(schedule, work)[0] <= limit


def test_slots_and_states_belong_together():
    schedule, work = planned(0.5)
    match(validate(schedule), work)
    with pytest.raises(InputError, match="states_rest .*needs state_slots"):
        validate(replace(schedule, state_slots=None))
    with pytest.raises(InputError, match="no group's states rest on the drive"):
        validate(replace(schedule, groups=tuple(replace(g, states_rest=None) for g in schedule.groups)))
    for slots, size, field in ((1, 4096, "slots"), (3, 4097, "slot_bytes"), (3, 0, "slot_bytes")):
        with pytest.raises(InputError, match=f"state_slots.{field} = "):
            validate(replace(schedule, state_slots=StateSlots(slots=slots, slot_bytes=size)))


def on_device(schedule, *chosen, **more):
    """The schedule with the states of the groups ``chosen`` on the device."""
    groups = list(schedule.groups)
    for index in chosen:
        groups[index] = replace(groups[index], states_rest="device", **more)
    return replace(schedule, groups=tuple(groups))


def test_states_on_the_device_are_refused_where_a_group_or_a_run_cannot_step_there():
    schedule, work = planned(None)
    match(validate(on_device(schedule, 1)), work)
    for field in ("gradients", "shard_rests"):
        placed = replace(on_device(schedule, 1, **{field: "host"}), zero_stage=3)
        with pytest.raises(InputError, match=rf"groups\[1\].states_rest = 'device': .*its {field} cannot be 'host'"):
            check_rests(placed, Checker())
    for settings, message in (
        (OptimizerSettings(), "train with --optimizer-cpu-offload"),
        (OptimizerSettings(on_host=True, delayed=True), "cannot be combined with --delayed-parameter-update"),
    ):
        with pytest.raises(InputError, match=rf"groups\[1\].states_rest: .*{message}"):
            match(on_device(schedule, 1), replace(work, optimizer=settings))


def test_states_on_the_device_do_not_go_to_the_drive():
    """The limit is that of the others on the drive, so it is not kept where none of them may go."""
    schedule, work = planned(0.5)
    free = replace(schedule, state_slots=None, groups=tuple(replace(g, states_rest=None) for g in schedule.groups))
    few = on_device(free, 0, 1)
    placed = with_states_on_drive(few, work)
    assert [g.states_rest for g in placed.groups[:2]] == ["device", "device"]
    numbers = [sum(g.states_rest == "nvme" for g in one.groups) for one in (with_states_on_drive(free, work), placed)]
    assert 0 < numbers[1] < numbers[0]
    hosted = plan(replace(work, limits=Limits()), table(work), policy="all-cpu")
    with pytest.raises(InputError, match=r"host memory \(host copies \d+\), \d+ bytes short"):
        with_states_on_drive(on_device(hosted, *range(len(hosted.groups))), replace(work, limits=Limits(host_bytes=1)))


def test_a_run_whose_optimizer_or_parameters_do_not_fit_is_refused():
    schedule, work = planned(0.5)
    with pytest.raises(InputError, match="train with --optimizer-cpu-offload"):
        match(schedule, replace(work, optimizer=OptimizerSettings()))
    need = max(largest_region(group, work) for group in schedule.groups)
    small = replace(schedule, state_slots=StateSlots(slots=3, slot_bytes=need - 4096))
    with pytest.raises(InputError, match=f"needs {need} bytes for one parameter and its moments"):
        match(small, work)


@pytest.mark.parametrize(
    "settings, message",
    [
        (OptimizerSettings(), "the optimizer steps on the device"),
        (OptimizerSettings(on_host=True, gradient_dtype="bfloat16"), "in bfloat16 rounding can hide"),
    ],
)
def test_a_step_beside_the_backward_that_could_not_be_validated_is_refused(settings, message):
    schedule, work = planned(None)
    schedule = replace(schedule, rollback_bytes=1 << 20)
    match(validate(schedule), work)
    with pytest.raises(InputError, match=f"rollback_bytes.*{message}"):
        match(schedule, replace(work, optimizer=settings))
    with pytest.raises(InputError, match="rollback_bytes = 0: expected at least 1"):
        validate(replace(schedule, rollback_bytes=0))


def test_states_on_the_drive_that_are_stepped_beside_the_backward_are_there_twice_and_take_no_copy():
    schedule, work = planned(0.7)
    groups = tuple(replace(group, gradients="host") for group in schedule.groups)
    waits = replace(schedule, groups=groups, zero_stage=2, rollback_bytes=None)
    work = replace(work, zero_stage=2)
    beside = validate(replace(waits, rollback_bytes=0))
    one, two = (memory_bill(each, work)[0].memory for each in (waits, beside))
    assert two.nvme_bytes == 2 * one.nvme_bytes > 0
    assert two.host_bytes == one.host_bytes


def test_states_on_the_drive_have_no_rooms_where_updates_are_delayed():
    """Megatron copies all gradients then."""
    schedule, work = planned(0.7)
    late = replace(work, optimizer=replace(work.optimizer, delayed=True))
    slots = schedule.state_slots
    one, other = (memory_bill(schedule, each)[0].memory.host_bytes["staging_slots"] for each in (work, late))
    assert one > other == slots.slots * slots.slot_bytes


def test_narrow_gradients_of_states_on_the_drive_become_wide_on_the_device():
    schedule, work = planned(0.7)
    narrow = replace(work, optimizer=replace(work.optimizer, gradient_dtype="bfloat16"))
    own = [group for group in schedule.groups if group.pp_rank == 0]
    on_drive = [group for group in own if group.states_rest == "nvme"]
    assert 0 < len(on_drive) < len(own)
    need = max(largest_gradient(group, narrow) for group in on_drive)
    buffers = [memory_bill(schedule, each)[0].memory.device_bytes.get("buffers", 0) for each in (work, narrow)]
    assert buffers[1] == buffers[0] + need
    assert narrow_gradient_bytes(own, narrow) == need and narrow_gradient_bytes(own, work) == 0
    delayed = replace(narrow, optimizer=replace(narrow.optimizer, delayed=True))
    assert narrow_gradient_bytes(own, delayed) == max(largest_gradient(group, narrow) for group in own)


def test_a_drive_has_several_reads_and_writes_waiting_where_the_states_of_a_rank_are_many():
    numbers = []
    for shape in ({"layers": 12}, {"layers": 64}, {"layers": 12, "pp": 2, "order": "1f1b"}):
        work = on_host(**shape)
        schedule = plan(work, table(work), policy="all-gpu")
        half = replace(work, limits=replace(work.limits, host_bytes=host_bytes_of_nodes(schedule, work)[0] // 2))
        slots = with_states_on_drive(schedule, half).state_slots
        assert slots is not None
        numbers.append(slots.slots)
    assert numbers == [FEW_SLOTS, STATE_SLOTS, FEW_SLOTS]
