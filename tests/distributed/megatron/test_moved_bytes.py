"""What ranks move in an iteration is what the byte bill says, by kind and link, over routes and places."""

import pytest
from cases import MODELS, STRICT
from msgspec.structs import replace
from placed_schedules import ALL, SHARDS, beside_backward, everything, on_drive, slots, some_on_device
from planning_cases import line, make_table
from run_files import make_metrics
from variations import some

from megatron_ext import report
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats import trace as traces
from megatron_ext.formats.moved_bytes import byte_differences
from megatron_ext.report import moved
from megatron_ext.report.links_busy import STEP
from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.byte_bill import byte_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits, Workload

ITERATIONS = 3


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


OFFLOAD = dict(name="bf16-offload", on_host=True)
NOT_CLIPPED = ["--clip-grad", "1e9"]
"""No step during the backward is taken back: what is made again moves again."""

DELAYED = ["--delayed-parameter-update", "0"]
CASES = {
    "routes and gradients": dict(name="bf16-tied", make=ALL),
    "two nodes": dict(name="bf16-tied", make=everything(("gpu", "cpu", "nvme"), shards=True), nodes=2),
    "slots": OFFLOAD | dict(make=slots("host", ALL)),
    "slots, cast on the device": OFFLOAD | dict(make=slots("device", SHARDS)),
    "states on the drive": OFFLOAD | dict(make=on_drive(SHARDS)),
    "Megatron's step": OFFLOAD | dict(make=ALL),
    "delayed": OFFLOAD | dict(make=SHARDS, options=DELAYED),
    "shards on the host": dict(name="bf16-tied", make=SHARDS),
    "shards gathered": dict(name="bf16-tied", make=everything(("cpu_shard",), shards=True)),
    "zero stage 1": dict(name="fp32", make=everything(("gpu", "cpu", "nvme")), zero_stage=1),
    "Megatron's step, shards": OFFLOAD | dict(make=SHARDS),
    "states on the device": OFFLOAD | dict(make=some_on_device(everything(("gpu", "cpu"), ("sharded",)))),
    "during the backward": OFFLOAD | dict(make=beside_backward(SHARDS), options=NOT_CLIPPED),
    "during the backward, on the drive": OFFLOAD | dict(make=on_drive(beside_backward(ALL)), options=NOT_CLIPPED),
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
        for one in byte_differences(planned[rank], own)
    ]


@pytest.mark.parametrize("case", some(list(CASES), 5))
def test_what_is_moved_is_what_is_billed(train, case):
    schedule, workload, counted = train(**CASES[case])
    assert [len(moved) for moved in counted] == [ITERATIONS] * 2
    unlike = said(schedule, workload, counted)
    if schedule.rollback_bytes is not None:  # on a loaded machine a backward may end before a step beside it begins
        unlike = [one for one in unlike if one[2] not in ("step", "states")]
    assert unlike == []
    held = {f"{kind} {link}" for own in counted for kind, links in own[-1].items() for link in links}
    assert not {one for one in MOVED.get(case, "").split(", ") if one} - held


def test_a_report_of_such_a_run_says_it_and_what_was_hidden(train, tmp_path):
    schedule, work, _ = train("bf16-offload", slots("host", ALL), on_host=True)
    workload_file.save(tmp_path / "workload.json", work)
    lines = {name: line(5.0, 1e3) for name in ("host_add", "host_step", "reduce", "optimizer")}
    cost.save(tmp_path / "cost_table.json", make_table(work, nvme=(9.0, 1e3), **lines))
    for name in ("stock", "scheduled"):  # whatever it is compared with
        json_files.save(tmp_path / f"{name}.metrics.json", make_metrics(ITERATIONS, 2))
        (tmp_path / f"{name}.trace.json").write_bytes((tmp_path / "trace.json").read_bytes())
    built = report.build(report.load(tmp_path), extrapolate=True)
    assert moved.lines(built.moved) == ["every rank has moved the planned bytes, by kind and link"]
    measured, simulated = built.hidden["measured"], built.hidden["simulated"]
    both = {STEP, "publishing", "gradients to the host", "gradients added in host memory", "copies to the device"}
    assert both <= set(measured) & set(simulated)
    assert measured[STEP] == (measured[STEP].us, 0.0) and measured[STEP].us > 0  # it waits for the norm
    assert all(0 <= one.share <= 1 for found in (measured, simulated) for one in found.values())
    assert {"new parameters to the device", "drive to staging slots"} <= set(measured)


def test_a_gradient_that_is_not_reduced_is_missed(train):
    """Negative control: group 1 is left out."""
    found = said(*train(**CASES["slots"], environment={"MEGATRON_EXT_FAULTS": "skip_reduce=1"}))
    missed = {(kind, link) for _, _, kind, link, planned, counted in found if counted < planned}
    assert ("gradient", "network") in missed and len(missed) == len({one[2:4] for one in found})
