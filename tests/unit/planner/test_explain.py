"""One group of a plan is followed through all passes, with what each decided and why."""

import re

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload, uneven_case

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import explain, plan, planned
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

PASSES = ("cut", "offload", "place", "step slots", "rest states", "host step")


def little_memory(ranks: int):
    shape = dict(pp=1, vp=1, dp=ranks, order="no_pipeline", layers=4, microbatches=2, zero_stage=3, hidden=128)
    work = replace(make_workload(**shape), optimizer=OptimizerSettings(on_host=True))
    table = make_table(work, gpu=(20.0, 8e3), cpu=(10.0, 12e3), nvme=(10.0, 4e3), optimizer=line(5.0, 4e4))
    curves = {"host_step": line(5.0, 8e3), "host_add": line(1.0, 4e4), "reduce": line(20.0, 6e3)}
    table = replace(table, **curves)
    limits = Limits(device_bytes=evaluate(work, table).memory[0].memory.device_total_bytes * 6 // 10)
    held = max(host_bytes_of_nodes(plan(replace(work, limits=limits), table), work))
    return planned(replace(work, limits=replace(limits, host_bytes=int(0.9 * held))), table)


@pytest.fixture(scope="module")
def in_little_memory():
    """Little device memory, and host memory in which few copies of states have room: gradients and shards rest on the
    host, which steps through slots, some of it during the backward."""
    return little_memory(2)


@pytest.fixture(scope="module")
def on_drive():
    """Host memory has room for half of what it would hold, so that states rest on the drive."""
    work = replace(make_workload(layers=4), optimizer=OptimizerSettings(on_host=True))
    rate = sum(chunk.bytes for chunk in work.chunks_of_rank(0)) / 800.0
    curves = {"host_step": line(0.1, rate), "optimizer": line(5.0, rate), "host_add": line(0.01, 1e5)}
    table = replace(make_table(work, gpu=(0.01, 1e7), nvme=(1.0, 1e4)), reduce=line(0.1, 1e6), **curves)
    held = max(host_bytes_of_nodes(plan(work, table), work))
    return planned(replace(work, limits=Limits(host_bytes=held // 2)), table)


def lines_of(found, group: int) -> dict[str, list[str]]:
    """What is said of a group, by pass."""
    first, *lines = explain(found, str(group)).splitlines()
    assert first.startswith(f"group {group}: {found.schedule.groups[group].parameters[0]}")
    said = [line.strip().split(": ", 1) for line in lines]
    assert list(dict.fromkeys(step for step, _ in said)) == list(PASSES)
    return {step: [text for name, text in said if name == step] for step in PASSES}


@pytest.mark.parametrize("name", ("in_little_memory", "on_drive"))
def test_a_group_goes_through_all_passes_and_each_says_what_the_schedule_holds(request, name):
    found = request.getfixturevalue(name)
    schedule, limits = found.schedule, found.workload.limits
    rests = {None: "in host memory", "nvme": f"on the drive, as limits.host_bytes {limits.host_bytes}"}
    kept = {None: "whole on the device", "sharded": "in shards on the device", "host": "in host memory"}
    for index in (0, len(schedule.groups) - 1):
        group, said = schedule.groups[index], lines_of(found, index)
        assert f"in shards among {group.ranks} ranks; the plan has {len(schedule.groups)} groups" in said["cut"][-1]
        gradient, shard = said["offload"]
        assert f"rests {kept[group.gradients]}" in gradient
        if schedule.zero_stage == 3:
            assert f"limits.device_bytes is {limits.device_bytes}" in gradient
            assert f"rests {'in host memory' if group.shard_rests else 'on the device'}" in shard
        rank = schedule.ranks[group.pp_rank]
        actions = [a for entry in (rank.start, *rank.steps) for a in entry.unshard if a.group == index]
        routes = [text.split(",")[0] for text in said["place"][1:] if text.startswith("by ")]
        assert routes == [f"by {action.route}" for action in actions][:3]
        assert any(text.startswith(rests[group.states_rest]) for text in said["rest states"])
        assert ("passes through slots" in said["step slots"][-1]) == (schedule.step_slots is not None)
        assert said["host step"][0].startswith("the host steps during the backward: an iteration takes ")
        assert schedule.rollback_bytes is not None


def test_other_choices_are_simulated_and_none_that_is_possible_is_faster_by_far(in_little_memory):
    """A plan that is much slower than one change of one group would not be the plan."""
    ours = in_little_memory.schedule.predicted.iteration_time_us / 1e3
    text = explain(in_little_memory, "0")
    times = [float(ms) for ms in re.findall(r"([\d.]+) ms per iteration", text)]
    assert len(times) > 4 and times.count(pytest.approx(ours, abs=1e-3)) >= 3
    assert min(times) > 0.9 * ours
    assert "not possible, " in text and " bytes short" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_on_the_device_take_gradient_shard_and_gathers_along(ranks):
    found = little_memory(ranks)
    moved = [lines_of(found, index)["rest states"][-1] for index in range(len(found.schedule.groups))]
    refused = [said.partition("on the device: not possible, ")[2] for said in moved if "on the device: not" in said]
    assert len(moved) > 2 and any(group.shard_rests or group.alone for group in found.schedule.groups)
    assert all("bytes" in why and "short" in why for why in refused), refused


def test_a_group_is_named_by_its_number_or_by_a_parameter(in_little_memory):
    found = in_little_memory
    name = found.schedule.groups[1].parameters[0]
    assert explain(found, name) == explain(found, "1")
    for wrong in ("nothing", str(len(found.schedule.groups)), "-1"):
        with pytest.raises(InputError, match=rf"--explain = '{wrong}': no such group; expected a number, 0 to"):
            explain(found, wrong)


def test_a_name_in_several_chunks_is_refused_with_their_groups():
    work = make_workload(layers=1)
    found = planned(work, make_table(work), policy="all-gpu")
    with pytest.raises(InputError, match="is a parameter of groups 0, 1, 2, 3, of different chunks"):
        explain(found, found.schedule.groups[0].parameters[0])


@pytest.mark.parametrize("seed", (30, 37))
def test_no_gradient_or_shard_would_be_faster_in_room_that_the_plan_leaves_free(seed):
    """Layers are unequal, so whole parameters do not use all the room that a rule leaves them."""
    work, table = uneven_case(seed)
    table = replace(table, host_add=line(1.0, 4e4), reduce=line(20.0, 6e3), optimizer=line(5.0, 4e4))
    stock = max(bill.memory.device_total_bytes for bill in evaluate(work, table).memory)
    found = planned(replace(work, limits=Limits(device_bytes=stock * 8 // 10)), table)
    assert any(group.gradients or group.shard_rests for group in found.schedule.groups)
    ours = found.schedule.predicted.iteration_time_us / 1e3
    for group in range(len(found.schedule.groups)):
        moved = " ".join(lines_of(found, group)["offload"])
        assert all(float(ms) > 0.999 * ours for ms in re.findall(r"([\d.]+) ms per iteration", moved))
