"""A missing figure is never nothing: every part of a complete table is taken away in turn."""

import pytest
from msgspec.structs import replace

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.cost_table_text import all_curves
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.gain_interval import gain_interval
from megatron_ext.planner.missing_figures import interval_of, refuse_missing
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.user_defined_schedule import StateSlots, StepSlots
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Limits

SHAPE = GptShape(4, 512, 2048, 8, 8, 1024, 64, positions=512, tied=False)
BATCH = MicroBatch(512, 2)


def work_of(zero_stage, **how):
    """Data-parallel groups of eight ranks, each on two nodes."""
    parallel = Parallel.of(pp=2, vp=2, dp=8, microbatches=4, gpus_per_node=4, order="interleaved")
    return gpt_workload(SHAPE, parallel, BATCH, zero_stage=zero_stage, **how)


def table_of(work):
    return estimate(sheets.load("h200-rdma"), work, BATCH)


def gathered(policy, **limits):
    work = work_of(3, limits=Limits(**limits))
    return work, plan(work, table_of(work), policy=policy)


def host_gradients():
    """Added up in host memory, and stepped on the device."""
    work, schedule = gathered("all-gpu")
    groups = tuple(replace(group, gradients="host") for group in schedule.groups)
    return work, replace(schedule, groups=groups)


def on_host(cast="device", **states):
    """Steps of the host during the backward, new parameters cast on the device; ``states`` of every other group."""
    work = work_of(2, optimizer=OptimizerSettings(on_host=True))
    schedule = stock_schedule(work, layer_buckets)
    groups = tuple(
        replace(group, gradients="sharded", **(states if index % 2 else {}))
        for index, group in enumerate(schedule.groups)
    )
    slots = StateSlots(slots=2, slot_bytes=1 << 24) if states.get("states_rest") == "nvme" else None
    step = StepSlots(slots=2, slot_bytes=1 << 26, cast=cast)
    return work, replace(schedule, groups=groups, step_slots=step, state_slots=slots, rollback_bytes=1 << 34)


CASES = {
    "host copies": lambda: gathered("all-cpu"),
    "the drive": lambda: gathered("random:3", nvme_slots=2, pinned_host_bytes=0),
    "gradients in host memory": host_gradients,
    "states on the device": lambda: on_host(states_rest="device"),
    "parameters cast on the host": lambda: on_host("host"),
    "states on the drive": lambda: on_host(states_rest="nvme"),
}


def without(table: cost.CostTable):
    """Every part by its name, and the table that lacks it."""
    for name, curve in all_curves(table):
        place, _, leaf = name.rpartition(".")
        gone = replace(getattr(table, place), **{leaf: None}) if place else () if leaf == "p2p" else None
        yield name, replace(table, **{place or leaf: gone})
        for algorithm in curve.algorithms:
            rest = {key: points for key, points in curve.algorithms.items() if key != algorithm}
            yield f"{name}.algorithms.{algorithm}", replace(table, **{name: replace(curve, algorithms=rest)})
    yield "compute", replace(table, compute=())
    yield "call_us", replace(table, group_overhead=cost.GroupOverhead())
    yield "host_memory", replace(table, host_memory=None)
    rows = tuple(replace(row, forward_launch_us=None, backward_launch_us=None) for row in table.compute)
    yield "launches of layers", replace(table, compute=rows)
    for index, row in enumerate(table.compute):
        for name in ("forward_launch_us", "backward_launch_us"):
            others = (*table.compute[:index], replace(row, **{name: None}), *table.compute[index + 1 :])
            yield f"{name} of row {index}", replace(table, compute=others)
    yield "launches of parameters", replace(table, launches=None)
    yield "launches", replace(table, launches=None, compute=rows)
    for pair in dict.fromkeys((row.measured, row.busy) for row in table.contention):
        rows = tuple(row for row in table.contention if (row.measured, row.busy) != pair)
        yield f"contention {' beside '.join(pair)}", replace(table, contention=rows)
    yield "contention", replace(table, contention=())


REFUSED_SOMEWHERE = {
    *("routes.gpu", "routes.cpu", "routes.nvme", "publish.cpu", "publish.nvme", "publish.internode", "p2p", "reduce"),
    *("optimizer", "host_add", "host_step", "device_step", "compute"),
    *("host_step.algorithms.cast_on_device", "host_step.algorithms.joined"),
}


def predicted(work, table, schedule):
    return evaluate(work, table, schedule, bound_us=0.0)


def refusals(name: str) -> set[str]:
    """Parts without which the case is refused; without any other its interval must hold the complete table's figure."""
    work, schedule = CASES[name]()
    table, found = table_of(work), set()
    complete = predicted(work, table, schedule)
    refuse_missing(complete.left_out)
    for part, lacking in without(table):
        try:
            result = predicted(work, lacking, schedule)
            refuse_missing(result.left_out, file="table.json")
        except InputError as error:
            text = str(error)
            assert part.partition(".algorithms")[0] in text and "megatron-ext measure" in text, (part, text)
            found.add(part)
            continue
        interval = interval_of(lacking, result, lambda each: predicted(work, each, schedule).iteration_time_us)
        low, high = (interval.low_us, interval.high_us) if interval else (result.iteration_time_us,) * 2
        assert low * (1 - 1e-9) <= complete.iteration_time_us <= high * (1 + 1e-9), (name, part, low, high)
    return found


def test_every_part_is_refused_or_held_by_an_interval():
    assert set().union(*map(refusals, CASES)) == REFUSED_SOMEWHERE


def test_the_interval_of_a_gain_holds_that_of_the_complete_table():
    work, schedule = gathered("all-cpu")
    other = plan(work, table_of(work), policy="all-gpu")
    table = table_of(work)
    whole = gain_interval(work, table, schedule, other)
    for part, lacking in without(table):
        if part in ("contention", "contention gpu beside cpu", "call_us", "host_memory"):
            found = gain_interval(work, lacking, schedule, other)
            assert found.low <= whole.gain <= found.high, part
            assert found.missing, part


def test_the_refusal_names_the_curve_and_the_commands():
    with pytest.raises(InputError) as caught:
        refuse_missing(("host_add", "device_step"), file="t.json")
    text = str(caught.value)
    assert text.startswith("t.json: host_add") and "host_add, device_step" in text and "\n" not in text
    assert "measure --links host_add --optimizer-on-host" in text and "cost estimate --hardware NAME" in text
