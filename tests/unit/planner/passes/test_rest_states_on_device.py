"""The planner decides which groups keep their optimizer states on the device while the host steps the others."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload
from variations import some

from megatron_ext.cost.cost_table import CAST_ON_DEVICE
from megatron_ext.planner import plan
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.passes import rest_states
from megatron_ext.planner.passes.rest_states import bytes_to_reserve, with_states_on_device
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, memory_bill
from megatron_ext.schedule.user_defined_schedule import StepSlots
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

MAIN_AND_STATES = 6
"""Bytes of float32 parameters and two moments, for each of a 16-bit parameter."""


def case(device_rate: float = 1e6, zero_stage: int = 1, **limits):
    """The host's step of everything takes as long as three quarters of the compute; the device's step is short."""
    shape = dict(pp=1, vp=1, microbatches=2, order="no_pipeline") if zero_stage == 3 else {}
    work = make_workload(layers=4, zero_stage=zero_stage, **shape)
    work = replace(work, optimizer=OptimizerSettings(on_host=True), limits=Limits(**limits))
    rank_bytes = sum(chunk.bytes for chunk in work.chunks_of_rank(0))
    table = make_table(work, gpu=(0.01, 1e7))
    rate = rank_bytes / (1800.0 if zero_stage == 1 else 450.0)
    curves = {"host_step": line(0.1, rate), "optimizer": line(5.0, rate), "host_add": line(0.01, 1e5)}
    return work, replace(table, reduce=line(0.1, 1e6), device_step=line(0.1, device_rate), **curves)


def held(schedule, work):
    return [bill.memory.device_total_bytes for bill in memory_bill(schedule, work)]


def on_device(schedule):
    return {index for index, group in enumerate(schedule.groups) if group.states_rest == "device"}


def least(**how):
    """What the ranks hold with all states in host memory, and the bytes of all states of a rank."""
    work, table = case(**how)
    rank_bytes = sum(chunk.bytes for chunk in work.chunks_of_rank(0))
    return max(held(plan(work, table), work)), rank_bytes // work.parallel.dp * MAIN_AND_STATES


@pytest.mark.parametrize(("part", "zero_stage"), some([(0.6, 1), (0.6, 3), (1.1, 1), (0.3, 1)], 3))
def test_as_many_states_as_have_room_rest_on_the_device_where_the_host_is_slow(part, zero_stage):
    taken, states = least(zero_stage=zero_stage)
    limit = taken + int(part * states)
    work, table = case(device_bytes=limit, zero_stage=zero_stage)
    schedule = plan(work, table)
    without = plan(work, replace(table, device_step=None))
    assert max(held(schedule, work)) <= limit
    assert on_device(schedule) and not on_device(without)
    assert schedule.predicted.iteration_time_us < 0.97 * without.predicted.iteration_time_us
    assert schedule.predicted.lower_bound_us <= schedule.predicted.iteration_time_us
    assert host_bytes_of_nodes(schedule, work)[0] < host_bytes_of_nodes(without, work)[0]


@pytest.mark.parametrize("how", [{}, {"device_rate": 10.0}, {"room": 0.0}])
def test_no_states_rest_there_without_a_limit_where_the_device_is_slow_or_without_room(how):
    taken, states = least()
    room = {"device_bytes": taken + int(how.pop("room", 2.0) * states)} if how else {}
    work, table = case(**how, **room)
    schedule = plan(work, table)
    assert not on_device(schedule)


def test_groups_whose_steps_hide_least_go_first_and_their_gradients_and_shards_with_them():
    work, table = case(zero_stage=3, device_bytes=10**9)
    schedule = plan(work, replace(table, device_step=None))
    groups = tuple(replace(group, gradients="host", shard_rests="host") for group in schedule.groups)
    order = sorted(range(len(groups)), key=lambda index: -index)
    schedule = replace(schedule, groups=groups, limits=work.limits)
    one = held(schedule, work)[0] + groups[order[0]].bytes // 2 * (MAIN_AND_STATES + 1 + 2) + 100
    work = replace(work, limits=Limits(device_bytes=one))
    ((_, moved),) = with_states_on_device(schedule, work, order, (1.0,))
    assert on_device(moved) == {order[0]} and max(held(moved, work)) <= one
    assert (moved.groups[order[0]].gradients, moved.groups[order[0]].shard_rests) == ("sharded", None)
    by_shard = replace(schedule, ranks=tuple(_by_cpu_shard(rank) for rank in schedule.ranks))
    assert not [*with_states_on_device(by_shard, work, order, (1.0,))]  # these shards have to rest in host memory


def test_gradients_of_a_rank_alone_stay_whole_where_the_limit_has_room_for_those_that_then_come_together():
    """The reduce of each small group frees the whole gradient of the large one before it; one that stays does not."""
    work, table = case(zero_stage=3, device_bytes=10**9)
    work = replace(work, parallel=replace(work.parallel, data_parallel_size=1), zero_stage=2)
    layers = [[p for p in work.chunks[0].parameters if p.layer == layer] for layer in range(4)]
    norms = [[[p for p in layer if p.name.endswith("norm") == small] for small in (False, True)] for layer in layers]
    schedule = plan(work, replace(table, device_step=None))
    like = replace(schedule.groups[0], gradients="host", ranks=1)
    cut = [(tuple(p.name for p in some), sum(p.bytes for p in some)) for both in norms for some in both]
    small = [index for index in range(8) if index % 2]
    groups = [replace(like, parameters=names, bytes=size, alone=i in small) for i, (names, size) in enumerate(cut)]
    schedule = replace(schedule, groups=tuple(groups))
    peaks = {}
    for room in (1.0, 1e5, 1e9):
        limit = held(schedule, work)[0] + int(room) + sum(20 * cut[index][1] for index in small)
        ((_, moved),) = with_states_on_device(schedule, replace(work, limits=Limits(device_bytes=limit)), small, (1.0,))
        assert on_device(moved) == {*small} and held(moved, work)[0] <= limit
        peaks[moved.groups[1].gradients] = held(moved, work)[0]
        assert moved.groups[1].alone == (moved.groups[1].gradients is not None)
    assert peaks["sharded"] < peaks[None]


def _by_cpu_shard(rank):
    def change(entry):
        return replace(entry, unshard=tuple(replace(action, route="cpu_shard") for action in entry.unshard))

    return replace(rank, start=change(rank.start), steps=tuple(map(change, rank.steps)))


def test_fewer_states_go_to_the_drive_where_some_rest_on_the_device():
    taken, states = least()
    work, table = case()
    drive = make_table(work, gpu=(0.01, 1e7), nvme=(1.0, 1e3))
    table = replace(table, routes=drive.routes, publish=drive.publish)
    short = int(0.7 * host_bytes_of_nodes(plan(work, table), work)[0])
    number = {}
    for room in (0.0, 0.5):
        limits = Limits(device_bytes=taken + int(room * states), host_bytes=short)
        schedule = plan(replace(work, limits=limits), table)
        assert host_bytes_of_nodes(schedule, work)[0] <= short
        number[room] = sum(group.states_rest == "nvme" for group in schedule.groups)
    assert number[0.0] > number[0.5]


def test_at_zero_stage_3_room_is_left_for_states_where_that_is_faster(monkeypatch):
    """Whole parameters take all the room there is, although they come in no time and the host's step is long."""
    work, table = case(zero_stage=3)
    taken, states = least(zero_stage=3)
    work = replace(work, limits=Limits(device_bytes=taken))
    schedule = plan(work, table)
    monkeypatch.setattr(rest_states, "RESERVED", ())
    greedy = plan(work, table)
    assert max(held(schedule, work)) <= taken and len(on_device(schedule)) > len(on_device(greedy))
    assert schedule.predicted.iteration_time_us < 0.97 * greedy.predicted.iteration_time_us
    again = evaluate(work, table, schedule)
    assert again.iteration_time_us == schedule.predicted.iteration_time_us


@pytest.mark.parametrize(("cast_rate", "leaves"), [(4.0, True), (1.0, False)])
def test_room_is_left_for_the_slot_in_which_parameters_are_cast_where_that_is_faster(cast_rate, leaves):
    """Only where they are cast on the host so far."""
    work, table = case(device_rate=1e-3, zero_stage=3, device_bytes=1 << 40)  # states on the device would not help
    points = replace(table.host_step, algorithms={CAST_ON_DEVICE: faster(table.host_step, cast_rate)})
    schedule = plan(work, table)
    slots = StepSlots(slots=4, slot_bytes=1 << 20, cast="host")
    timing = Timing(work, replace(table, host_step=points))
    asked = [bytes_to_reserve(Candidate(work, timing, replace(schedule, step_slots=one))) for one in (slots, None)]
    assert asked == [[slots.slot_bytes * 3 // 2] if leaves else [], []]
    cast_there = replace(schedule, step_slots=replace(slots, cast="device"))
    assert bytes_to_reserve(Candidate(work, timing, cast_there)) == []


def faster(curve, times):
    return tuple(replace(point, p50_us=point.p50_us / times) for point in curve.points)
