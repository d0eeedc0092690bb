"""A missing figure is never nothing: every part of a complete table is taken away in turn."""

import pytest
from checkout_under_test import write_cost_table
from msgspec.structs import replace
from parallel_sizes import sized
from planning_cases import make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.cost_table_text import all_curves
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.cost.perturbed_table import PerturbedTables
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.gain_interval import gain_interval
from megatron_ext.planner.missing_figures import interval_of, missing_curves, refuse_missing
from megatron_ext.planner.reroute import by_cpu_shard
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.user_defined_schedule import StateSlots, StepSlots
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.gpt_shapes import ExpertShape, GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

SHAPE = GptShape(4, 4096, 16384, 32, 32, 1024, 128, positions=2048, tied=False)
"""Of layers whose compute takes longer than their launches: these would hide what else takes time."""
BATCH = MicroBatch(2048, 4)


def work_of(zero_stage, dp=8, ep=1, **how):
    """Data-parallel groups of eight ranks, each on two nodes; at zero stage 1 on one; or one rank alone."""
    many = dict(pp=2, vp=2, gpus_per_node=4, order="interleaved") if zero_stage > 1 < dp else dict(order="no_pipeline")
    parallel = sized(dp=dp, ep=ep, microbatches=4, **many)
    shape = SHAPE._replace(experts=ExpertShape(8, 2, 4096, (0, 1, 0, 1))) if ep > 1 else SHAPE
    return gpt_workload(shape, parallel, BATCH, zero_stage=zero_stage, **how)


def table_of(work):
    """Estimated, with a row of contention for every pair: what one more is missing beside would hide it."""
    machine = "h200-one-gpu" if work.parallel.dp == 1 else "h100-pcie" if work.zero_stage == 1 else "h200-rdma"
    return PerturbedTables(estimate(sheets.load(machine), work, BATCH), cost.KINDS).with_missing_at(0.3)


def gathered(policy, zero_stage=3, dp=8, ep=1, on_host=False, **limits):
    work = work_of(zero_stage, dp, ep, limits=Limits(**limits), optimizer=OptimizerSettings(on_host=on_host))
    return work, plan(work, table_of(work), policy=policy)


def from_host(*given):
    """Shards and gradients in host memory, gathered from there."""
    work, schedule = gathered("all-gpu", *given, on_host=True)
    schedule = by_cpu_shard(schedule)
    groups = tuple(replace(group, gradients="host", shard_rests="host") for group in schedule.groups)
    return work, replace(schedule, groups=groups)


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
    slots = StateSlots(slots=2, slot_bytes=1 << 29) if states.get("states_rest") == "nvme" else None
    step = StepSlots(slots=2, slot_bytes=1 << 30, cast=cast)
    return work, replace(schedule, groups=groups, step_slots=step, state_slots=slots, rollback_bytes=1 << 36)


CASES = {
    "host copies": lambda: gathered("all-cpu"),
    "the drive": lambda: gathered("random:3", nvme_slots=2),
    "gradients in host memory": host_gradients,
    "states on the device": lambda: on_host(states_rest="device"),
    "parameters cast on the host": lambda: on_host("host"),
    "states on the drive": lambda: on_host(states_rest="nvme"),
    "zero stage 1": lambda: gathered("all-cpu", 1),
    "shards of one rank in host memory": lambda: from_host(3, 1),
    "shards in host memory": from_host,
    "one rank": lambda: gathered("all-gpu", 1, 1),
    "experts": lambda: gathered("all-gpu", 3, 8, 2),
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
    yield "topology", replace(table, topology=cost.Topology())
    for index in range(len(table.compute)):
        yield f"compute of row {index}", replace(table, compute=table.compute[:index] + table.compute[index + 1 :])


REFUSED_SOMEWHERE = {
    *("routes.gpu", "routes.cpu", "routes.nvme", "publish.cpu", "publish.nvme", "publish.internode", "p2p", "reduce"),
    *("experts.gpu", "experts.reduce"),
    *("optimizer", "host_add", "host_step", "device_step", "compute"),
    *("host_step.algorithms.cast_on_device", "host_step.algorithms.joined"),
}


def predicted(work, table, schedule):
    return simulate(work, Timing(work, table), schedule, peaks=False)


def refusals(name: str) -> set[str]:
    """Parts without which the case is refused; without any other its interval must hold the complete table's figure."""
    work, schedule = CASES[name]()
    table, found = table_of(work), set()
    complete = predicted(work, table, schedule)
    refuse_missing(complete.left_out)
    assert complete.busy_us["launches"] < complete.iteration_time_us
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


def test_the_table_by_which_checkouts_are_tested_lacks_nothing(tmp_path):
    """scripts/test_checkouts.sh plans by it."""
    write_cost_table(tmp_path / "t.json")
    work, table = make_workload(), cost.load(tmp_path / "t.json")
    assert not missing_curves(work, table, plan(work, table, policy="random:7"))
