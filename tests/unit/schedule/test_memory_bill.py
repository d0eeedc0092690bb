"""The memory bill against sums worked out by hand, and what device_bytes refuses."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.bill_by_step import activation_peaks
from megatron_ext.schedule.footprint import device_peaks, pinned_host_bytes
from megatron_ext.schedule.group_facts import gradient_bytes, make_group
from megatron_ext.schedule.host_slots import host_add_bytes
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import (
    buffer_bytes,
    check_run,
    host_bytes_of_nodes,
    host_bytes_taken,
    memory_bill,
    resting_bytes,
)
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.bucket_layout import bucket_numel, shard_parts
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.route import shard_pieces
from megatron_ext.workload.state_layout import GRADIENT_SLOTS
from megatron_ext.workload.workload import Parameter

SAVED = (100_000, 50_000)


def with_saved(work, recompute_bytes=0):
    chunks = tuple(replace(c, activation_bytes=SAVED, recompute_bytes=recompute_bytes) for c in work.chunks)
    return replace(work, chunks=chunks)


def test_shards_hold_every_element_once_and_padding_nowhere():
    numels = (70, 1, 640, 3)
    held = [*map(sum, shard_parts(numels, 4))]
    assert sum(held) == sum(numels)
    assert max(held) <= bucket_numel(numels, 4) // 4
    assert shard_parts((128, 128), 2) == [[128], [128]]


def test_the_rank_that_holds_the_most_is_billed():
    """Padding is at the end, so the last ranks hold less: of dense parameters 64, 64, 64, 8 elements, of those of
    experts 128 or 72."""
    work = make_workload(pp=1, vp=1, dp=4, order="no_pipeline", layers=1)
    work = replace(work, parallel=replace(work.parallel, expert_model_parallel_size=2))
    dense = Parameter(name="dense", shape=(200,), dtype="bfloat16", bytes=400)
    chunk = replace(work.chunks[0], parameters=(dense, replace(dense, name="expert", expert=True)))
    work = replace(work, chunks=(chunk,))
    groups = [make_group(work, 0, 0, [parameter]) for parameter in chunk.parameters]
    assert [group.ranks for group in groups] == [4, 2]
    device, _ = resting_bytes(groups, work)
    assert device["main_parameters"] == 4 * (64 + 128) and device["optimizer_states"] == 8 * (64 + 128)


def test_zero_stage_1_by_hand():
    """bf16: W whole, 2 W of fp32 gradients, 12 bytes an element of main parameters and moments over DP."""
    work = with_saved(make_workload(pp=1, vp=1, dp=2, microbatches=2, order="no_pipeline", hidden=64, layers=2))
    (bill,) = evaluate(work, make_table(work)).memory
    numel = sum(p.numel for chunk in work.chunks for p in chunk.parameters)
    held = bill.memory.device_bytes
    assert held["whole_parameters"] >= 2 * numel and held["gradients"] == 2 * held["whole_parameters"]
    assert numel // 2 * 4 <= held["main_parameters"] <= 1.02 * numel // 2 * 4
    assert held["optimizer_states"] == 2 * held["main_parameters"]
    assert held["activations"] == sum(SAVED) and "shards" not in held
    assert bill.memory.at_step in ("0F0", "0B0", "0F1", "0B1")
    assert max(bill.step_device_bytes) == bill.memory.device_total_bytes


def test_activations_are_those_of_the_micro_batches_in_flight():
    """1F1B: the first of two pipeline ranks has two micro-batches in flight, the last has one."""
    work = with_saved(make_workload(pp=2, vp=1, microbatches=4, order="1f1b"), recompute_bytes=7)
    assert activation_peaks(work) == [2 * sum(SAVED) + 7, sum(SAVED) + 7]
    bills = evaluate(work, make_table(work)).memory
    assert [b.memory.device_bytes["activations"] for b in bills] == activation_peaks(work)


def test_what_the_output_layer_saved_is_freed_before_a_layer_is_recomputed():
    work = with_saved(make_workload(pp=1, vp=1, microbatches=2, order="no_pipeline"), recompute_bytes=60_000)
    work = replace(work, chunks=tuple(replace(c, layer_kinds=("transformer", "output")) for c in work.chunks))
    assert activation_peaks(work) == [100_000 + 60_000]
    (bill,) = evaluate(work, make_table(work)).memory
    assert bill.memory.device_bytes["activations"] == 160_000


def test_whole_parameters_at_zero_stage_3_are_the_footprint_where_nothing_is_saved():
    work = make_workload(zero_stage=3, layers=3, whole_parameter_bytes=300_000)
    planned = plan(work, make_table(work))
    bills = memory_bill(planned, work)
    assert [b.memory.device_bytes["whole_parameters"] for b in bills] == device_peaks(planned)
    assert list(planned.predicted.memory) == [b.memory for b in bills]
    assert len(bills[0].step_device_bytes) == len(planned.ranks[0].steps)


@pytest.mark.parametrize("zero_stage", (2, 3))
@pytest.mark.parametrize("on_host", (False, True))
def test_an_optimizer_on_the_device_gets_all_gradients_there(zero_stage, on_host):
    """By hand: its step holds what rests, every gradient shard, and at zero stage 2 whole parameters. No limit below
    that is kept, however little the steps of the pipeline hold."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", layers=6, zero_stage=zero_stage)
    work = replace(work, optimizer=OptimizerSettings(on_host=on_host))
    schedule = stock_schedule(work, layer_buckets)
    groups = tuple(replace(group, gradients="host", alone=True) for group in schedule.groups)
    (bill,) = memory_bill(replace(schedule, groups=groups), work)
    held, gradients = bill.memory.device_bytes, sum(gradient_bytes(group, work) // 2 for group in groups)
    assert (bill.memory.at_step == "optimizer") is not on_host
    if not on_host:
        whole = sum(group.bytes for group in groups) if zero_stage == 2 else 0
        assert (held["gradients"], held.get("whole_parameters", 0)) == (gradients, whole)
        assert max(bill.step_device_bytes) < bill.memory.device_total_bytes
        limits = replace(work.limits, device_bytes=max(bill.step_device_bytes))
        with pytest.raises(InputError, match=r"holds up to \d+ bytes at step optimizer"):
            match(replace(schedule, groups=groups, limits=limits), replace(work, limits=limits))


def test_states_on_the_host_leave_the_device():
    work = make_workload(pp=1, vp=1, order="no_pipeline")
    here, there = (
        evaluate(w, make_table(w)).memory[0].memory
        for w in (work, replace(work, optimizer=OptimizerSettings(on_host=True)))
    )
    moved = here.device_bytes["main_parameters"] + here.device_bytes["optimizer_states"]
    assert here.device_total_bytes - there.device_total_bytes == moved
    assert there.host_bytes["main_parameters"] + there.host_bytes["optimizer_states"] == moved


@pytest.mark.parametrize("gradient_dtype", ("float32", "bfloat16"))
def test_states_on_the_device_are_billed_there_and_the_others_in_host_memory(gradient_dtype):
    """16 bytes a parameter in host memory: main parameter, two moments, the gradient's copy. On the device the last
    is a reference where gradients are fp32."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", layers=2, hidden=128)
    work = replace(work, optimizer=OptimizerSettings(on_host=True, gradient_dtype=gradient_dtype))
    schedule = stock_schedule(work, layer_buckets)
    first, *rest = schedule.groups
    placed = replace(schedule, groups=(replace(first, states_rest="device"), *rest))
    before, after = (memory_bill(s, work)[0].memory for s in (schedule, placed))
    chosen = [p for p in work.chunks[0].parameters if p.name in first.parameters]
    shard = max(map(sum, shard_parts([p.numel for p in chosen], 2)))
    kinds = ("main_parameters", "optimizer_states", "gradients")
    assert [before.host_bytes[kind] - after.host_bytes[kind] for kind in kinds] == [4 * shard, 8 * shard, 4 * shard]
    assert sum(after.host_bytes.values()) > 0 and "main_parameters" not in before.device_bytes
    held = {"main_parameters": 4 * shard, "optimizer_states": 8 * shard}
    held |= {"gradient_shards": 4 * shard} if gradient_dtype == "bfloat16" else {}
    assert after.device_bytes == before.device_bytes | held


@pytest.mark.parametrize("zero_stage", (1, 3))
def test_a_plan_keeps_device_bytes(zero_stage):
    free = with_saved(make_workload(zero_stage=zero_stage, layers=2))
    need = max(b.memory.device_total_bytes for b in evaluate(free, make_table(free)).memory)
    fits = need if zero_stage == 1 else need - 40_000
    work = replace(free, limits=replace(free.limits, device_bytes=fits))
    planned = plan(work, make_table(work))
    assert max(memory.device_total_bytes for memory in planned.predicted.memory) <= fits
    short = replace(free, limits=replace(free.limits, device_bytes=need // 2))
    with pytest.raises(InputError, match=r"limits.device_bytes = .* bytes short.*--optimizer-cpu-offload frees"):
        plan(short, make_table(short))


def test_a_run_with_a_larger_optimizer_is_refused():
    work = with_saved(make_workload(pp=1, vp=1, order="no_pipeline"))
    on_host = replace(work, optimizer=OptimizerSettings(on_host=True))
    need = evaluate(on_host, make_table(work)).memory[0].memory.device_total_bytes
    planned = plan(replace(on_host, limits=replace(work.limits, device_bytes=need)), make_table(work))
    check_run(planned, on_host)
    with pytest.raises(InputError, match="with this run's optimizer, .* bytes short"):
        check_run(planned, work)


def test_shards_rest_on_the_host_where_the_device_has_no_room():
    """One rank, a limit below shards and gradients together: nothing stays on the device between uses."""
    free = with_saved(make_workload(pp=1, vp=1, dp=1, order="no_pipeline", zero_stage=3, layers=2))
    on_host = replace(free, optimizer=OptimizerSettings(on_host=True))
    table = make_table(on_host)
    stock = evaluate(on_host, table).memory[0].memory.device_bytes
    layer = sum(p.bytes for p in on_host.chunks[0].parameters if p.layer == 0)
    limit = stock["gradients"] + stock["activations"] + layer + 10_000
    assert limit < stock["gradients"] + stock["activations"] + stock["shards"] + layer
    planned = plan(replace(on_host, limits=replace(free.limits, device_bytes=limit)), table)
    assert {group.shard_rests for group in planned.groups} == {"host"}
    (memory,) = planned.predicted.memory
    assert memory.device_total_bytes <= limit and "shards" not in memory.device_bytes
    assert memory.host_bytes["shards"] == sum(group.bytes for group in planned.groups)


def test_bad_host_shards_are_refused():
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", zero_stage=3, dtypes=("float32",))
    table = make_table(work)
    hosted = plan(work, table, policy="all-cpu")
    marked = replace(hosted, groups=tuple(replace(group, shard_rests="host") for group in hosted.groups))
    validate(marked)
    with pytest.raises(InputError, match=r"groups\[0\].shard_rests = 'host': .*--optimizer-cpu-offload"):
        match(marked, work)
    match(marked, replace(work, optimizer=OptimizerSettings(on_host=True)))
    with pytest.raises(InputError, match=f"never published there: .* of its {marked.groups[0].bytes} bytes"):
        validate(replace(marked, publish=()))
    gathered = plan(work, table, policy="all-gpu")
    gathered = replace(gathered, groups=tuple(replace(group, shard_rests="host") for group in gathered.groups))
    with pytest.raises(InputError, match=f"rests in host memory: .* of its {gathered.groups[0].bytes} bytes"):
        validate(gathered)
    first = make_workload(pp=1, vp=1, dp=2, order="no_pipeline")
    stock = plan(first, make_table(first), policy="all-gpu")
    with pytest.raises(InputError, match="zero stage 1 keeps whole groups"):
        validate(replace(stock, groups=tuple(replace(group, shard_rests="host") for group in stock.groups)))


def test_shards_in_host_memory_count_as_pinned_and_keep_the_limit():
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", zero_stage=3)
    hosted = plan(work, make_table(work), policy="all-cpu")
    copies = sum(group.bytes for group in hosted.groups)
    assert pinned_host_bytes(hosted) == [copies]
    every = with_host_shards(hosted, work)
    assert all(group.shard_rests == "host" for group in every.groups)
    assert pinned_host_bytes(every) == [2 * copies]  # two ranks with half a copy each
    limits = replace(hosted.limits, pinned_host_bytes=2 * copies - 1)
    some = with_host_shards(replace(hosted, limits=limits), work)
    assert 0 <= sum(group.shard_rests == "host" for group in some.groups) < len(some.groups)
    validate(some)


def test_what_the_ranks_of_another_node_hold_is_still_taken_on_this_one():
    """Of the second: memory that its first iteration frees is there until then."""
    work = make_workload(pp=1, vp=1, dp=4, order="no_pipeline", zero_stage=3, gpus_per_node=2)
    schedule = with_host_shards(plan(work, make_table(work), policy="all-cpu"), work)
    first, second = host_bytes_of_nodes(schedule, work)
    held = [(first, first), (0, 0), (7, 99), (0, 0)]
    assert first and host_bytes_taken(schedule, work, held) == [0, second - 7]


def with_gradients(schedule, kept, reduce_every=1):
    groups = tuple(replace(group, gradients=kept, reduce_every=reduce_every) for group in schedule.groups)
    return validate(replace(schedule, groups=groups, zero_stage=2))


def by_layer(work, **kept):
    return with_gradients(replace(stock_schedule(work, layer_buckets), zero_stage=2), **kept)


@pytest.mark.parametrize("kept", ("sharded", "host"))
def test_whole_gradients_of_two_layers_are_there_at_a_time(kept):
    """Three equal layers: one in its backward, and the one before it until its reduce has been waited for."""
    work = make_workload(pp=1, vp=1, dp=2, microbatches=2, order="no_pipeline", layers=3, zero_stage=2)
    layer = 2 * by_layer(work, kept=kept).groups[0].bytes  # float32 gradients of bfloat16 parameters
    whole, parts = (memory_bill(by_layer(work, kept=way), work)[0] for way in (None, kept))
    assert whole.memory.device_bytes["gradients"] == 3 * layer and "gradient_shards" not in whole.memory.device_bytes
    assert parts.memory.device_bytes["gradients"] == 2 * layer
    on_device, on_host = (
        getattr(parts.memory, where).get(kind, 0)
        for where, kind in (("device_bytes", "gradient_shards"), ("host_bytes", "gradients"))
    )
    assert (on_device, on_host) == ((3 * layer // 2, 0) if kept == "sharded" else (0, 3 * layer // 2))
    # The first micro-batch's forward has none; the last reduce of a backward is waited for in the next one.
    rest = min(parts.step_device_bytes)
    assert [step - rest for step in parts.step_device_bytes] == [0, 2 * layer, layer, 2 * layer]


def test_gradients_that_are_reduced_every_second_time_stay_in_between():
    work = make_workload(pp=1, vp=1, dp=2, microbatches=3, order="no_pipeline", layers=3, zero_stage=2)
    layer = 2 * by_layer(work, kept="sharded").groups[0].bytes
    (bill,) = memory_bill(by_layer(work, kept="sharded", reduce_every=2), work)
    rest = min(bill.step_device_bytes)
    assert [(step - rest) // layer for step in bill.step_device_bytes] == [0, 3, 3, 3, 1, 2]


def test_pieces_and_two_legs_go_through_buffers():
    work = make_workload(pp=1, vp=1, dp=4, order="no_pipeline", zero_stage=3, layers=1, hidden=1700, gpus_per_node=2)
    gathered = stock_schedule(work)
    (group,) = gathered.groups
    assert buffer_bytes(gathered, work, 0) == 0
    two_legs = replace(gathered, groups=(replace(group, algorithm="hierarchical"),))
    assert buffer_bytes(two_legs, work, 0) == group.bytes + group.bytes // 2
    on_one_node = replace(work, parallel=replace(work.parallel, gpus_per_node=4))
    registered = replace(stock_schedule(on_one_node), groups=(replace(group, algorithm="symmetric"),))
    assert buffer_bytes(registered, on_one_node, 0) == group.bytes + group.bytes // 4
    sharded = with_host_shards(by_cpu_shard(gathered), work)
    assert buffer_bytes(sharded, work, 0) == -(-group.bytes // shard_pieces(group.bytes, group.ranks)) < group.bytes


def test_gradients_that_are_added_in_host_memory_come_through_slots_of_the_largest():
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", zero_stage=2, layers=4)
    schedule = with_gradients(plan(work, make_table(work), policy="all-gpu"), kept="sharded")
    hosted = lambda *indices: replace(
        schedule, groups=tuple(replace(g, gradients="host" if i in indices else g.gradients) for i, g in own)
    )
    own = list(enumerate(schedule.groups))
    sizes = [gradient_bytes(group, work) // 2 for group in schedule.groups]
    for indices in ((), (0,), range(len(own))):
        held = memory_bill(hosted(*indices), work)[0].memory.host_bytes
        assert held.get("staging_slots", 0) == GRADIENT_SLOTS * max((sizes[i] for i in indices), default=0)
        assert host_add_bytes(hosted(*indices).groups, work) == held.get("staging_slots", 0)


def test_a_group_that_one_rank_holds_whole_comes_from_its_shard_without_buffers():
    work = make_workload(pp=1, vp=1, dp=1, order="no_pipeline", zero_stage=3, hidden=2048)
    schedule = with_host_shards(by_cpu_shard(plan(work, make_table(work), policy="all-gpu")), work)
    assert validate(schedule).publish == () and shard_pieces(schedule.groups[0].bytes, 2) > 1
    bill = memory_bill(schedule, replace(work, optimizer=OptimizerSettings(on_host=True)))[0].memory
    assert bill.device_bytes.get("buffers", 0) == bill.device_bytes.get("shards", 0) == 0
    assert bill.host_bytes["shards"] == sum(group.bytes for group in schedule.groups)
    assert not bill.host_bytes.get("host_copies")
