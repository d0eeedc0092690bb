"""What ranks move in an iteration is what the byte bill says, by kind and link, over routes and places."""

import random

import pytest
from cases import MODELS, STRICT
from draw_schedule import draw_schedule, states_on_device, states_on_drive, with_gradients, with_step_slots
from msgspec.structs import replace

from megatron_ext.formats import trace as traces
from megatron_ext.formats.moved_bytes import differences
from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.byte_bill import byte_bill
from megatron_ext.schedule.host_shards import by_cpu_shard, with_host_shards
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits, Workload

ITERATIONS = 4


@pytest.fixture
def train(services, workloads, tmp_path):
    """``train(model, make, options)``: train by ``make(workload)``; gives the schedule, its workload, and by rank and
    iteration what was counted."""

    def run(name: str, make, options=(), nodes: int = 1, zero_stage: int = 3, on_host=False, **case):
        workload = workloads[STRICT, name]
        workload = replace(
            workload,
            zero_stage=zero_stage,
            limits=Limits(nvme_slots=2),
            parallel=replace(workload.parallel, gpus_per_node=2 // nodes),
            optimizer=OptimizerSettings(on_host=on_host, delayed="--delayed-parameter-update" in options),
        )
        schedule = validate.validate(make(workload))
        match.match(schedule, workload)
        schedule_file.save(tmp_path / "schedule.json", schedule)
        more = ["--gpus-per-node", str(2 // nodes), "--user-defined-schedule-nvme-path", str(tmp_path)]
        case |= dict(schedule=tmp_path / "schedule.json", trace=tmp_path / "trace.json", iterations=ITERATIONS)
        services(STRICT).run(options=[*MODELS[name], *more, *options], reference=False, **case)
        return schedule, workload, traces.load(tmp_path / "trace.json")[1]["moved_bytes"]

    return run


def everything(routes, kinds=("host", "sharded"), shards=False, seed=3):
    """A schedule with these routes, gradients of these kinds, and where asked for shards that rest on the host."""

    def make(workload: Workload) -> Schedule:
        schedule = draw_schedule(random.Random(seed), workload, routes)
        if routes == ("cpu_shard",):
            schedule = by_cpu_shard(draw_schedule(random.Random(seed), workload, ("gpu",)))
        schedule = with_host_shards(schedule, workload) if shards else schedule
        return with_gradients(random.Random(seed), schedule, workload, kinds)

    return make


def slots(cast: str, make):
    return lambda workload: with_step_slots(make(workload), workload, slots=2, cast=cast)


def on_drive(make):
    return lambda workload: states_on_drive(schedule := make(workload), workload, [*range(len(schedule.groups))], 2)


def some_on_device(make):
    return lambda workload: states_on_device(schedule := make(workload), [*range(0, len(schedule.groups), 2)])


OFFLOAD = dict(name="bf16-offload", on_host=True)
DELAYED = ["--delayed-parameter-update", "1"]
ALL = everything(("gpu", "cpu", "nvme"))
SHARDS = everything(("cpu", "nvme"), shards=True)
CASES = {
    "routes and gradients": dict(name="bf16-tied", make=ALL),
    "shards on the host": dict(name="bf16-tied", make=SHARDS),
    "shards gathered": dict(name="bf16-tied", make=everything(("cpu_shard",), shards=True)),
    "two nodes": dict(name="bf16-tied", make=everything(("gpu", "cpu", "nvme"), shards=True, seed=5), nodes=2),
    "zero stage 1": dict(name="fp32", make=everything(("gpu", "cpu", "nvme")), zero_stage=1),
    "Megatron's step": OFFLOAD | dict(make=ALL),
    "Megatron's step, shards": OFFLOAD | dict(make=SHARDS),
    "slots": OFFLOAD | dict(make=slots("host", ALL)),
    "slots, cast on the device": OFFLOAD | dict(make=slots("device", SHARDS)),
    "states on the drive": OFFLOAD | dict(make=on_drive(SHARDS)),
    "states on the device": OFFLOAD | dict(make=some_on_device(everything(("gpu", "cpu"), ("sharded",)))),
    "delayed": OFFLOAD | dict(make=SHARDS, options=DELAYED),
    "delayed, on the drive": OFFLOAD | dict(make=on_drive(ALL), options=DELAYED),
}
MOVED = {
    "routes and gradients": "gather to_device, gather drive_read, gather network, gradient to_device, "
    "gradient to_host, gradient network, host_add host_memory, publish to_host, publish drive_write",
    "shards on the host": "shard to_host, publish host_memory, publish drive_write",
    "shards gathered": "gather to_device, gather network",
    "two nodes": "publish network, publish drive_write",
    "Megatron's step": "gradient to_host, step host_memory, shard to_device, publish host_memory",
    "slots": "gradient to_host, step host_memory, shard to_device",
    "slots, cast on the device": "step host_memory",
    "states on the drive": "states drive_read, states drive_write",
    "states on the device": "step host_memory, shard to_device",
    "delayed": "shard host_memory, step host_memory",
    "delayed, on the drive": "shard to_device, states drive_read",
}
"""Kinds and links without which a case shows nothing."""


def said(schedule: Schedule, workload: Workload, counted) -> list:
    """By rank and iteration whatever is not as billed. The first iteration has what setting up has moved."""
    (planned,) = byte_bill(schedule, workload)
    return [
        (rank, number + 2, *one)
        for rank, moved in enumerate(counted)
        for number, own in enumerate(moved[1:])
        for one in differences(planned[rank], own)
    ]


@pytest.mark.parametrize("case", CASES)
def test_what_is_moved_is_what_is_billed(train, case):
    schedule, workload, counted = train(**CASES[case])
    assert [len(moved) for moved in counted] == [ITERATIONS] * 2
    assert said(schedule, workload, counted) == []
    held = {f"{kind} {link}" for own in counted for kind, links in own[-1].items() for link in links}
    assert not {one for one in MOVED.get(case, "").split(", ") if one} - held
