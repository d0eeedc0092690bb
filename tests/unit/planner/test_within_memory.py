"""Gradients, shards and routes planned together: every limit down to a fifth of stock's memory has a plan."""

import re

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload
from variations import some

from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.effort import judged_us
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.passes.offload_groups import Offloader, Residency, Rule
from megatron_ext.planner.problem import problem_of
from megatron_ext.planner.stock import groups_of
from megatron_ext.planner.within_memory import plan_within_memory
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.group_facts import gradient_bytes
from megatron_ext.schedule.match import match
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

LAYOUTS = {
    "PP 2 x VP 2 x DP 2": dict(pp=2, vp=2, dp=2, layers=3),
    "DP 4": dict(pp=1, vp=1, dp=4, order="no_pipeline", layers=6),
}


def case(layout, microbatches=2):
    work = make_workload(**LAYOUTS[layout], microbatches=microbatches, dtypes=("float32",))
    table = make_table(work, gpu=(20.0, 2e3), cpu=(10.0, 3e3), publish=(5.0, 5e3))
    table = replace(table, reduce=line(20.0, 1.5e3), host_add=line(1.0, 1e4))
    stock = max(bill.memory.device_total_bytes for bill in evaluate(work, table).memory)
    return work, table, stock


def limited(work, limit, zero_stage=3, on_host=True):
    return replace(
        work, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=on_host), limits=Limits(device_bytes=limit)
    )


@pytest.mark.parametrize("layout", some([*LAYOUTS][::-1], 1))
def test_less_memory_takes_longer_and_nothing_beats_the_bound(layout):
    work, table, stock = case(layout)
    times = []
    for percent in (100, 50, 25):
        planned = plan(limited(work, stock * percent // 100), table)
        assert max(m.device_total_bytes for m in planned.predicted.memory) <= stock * percent // 100
        assert planned.predicted.lower_bound_us <= planned.predicted.iteration_time_us * (1 + 1e-9)
        times.append(planned.predicted.iteration_time_us)
    assert times == sorted(times)
    kept = {group.gradients for group in planned.groups}
    assert kept & {"sharded", "host"} and "host" in {group.shard_rests for group in planned.groups}


@pytest.mark.parametrize("layout, zero_stage", some([*zip(LAYOUTS, (2, 3)), *zip(LAYOUTS, (3, 2))], 2))
def test_no_more_is_relieved_than_is_missing(layout, zero_stage):
    work, table, stock = case(layout)
    times = []
    for percent in (99, 90, {2: 84, 3: 70}[zero_stage]):  # less has no room for the shards of gradients at the step
        limit = stock * percent // 100
        planned = plan(limited(work, limit, zero_stage, on_host=False), table)
        freed = stock - max(memory.device_total_bytes for memory in planned.predicted.memory)
        unit = max(gradient_bytes(group, work) for group in planned.groups)
        assert stock - limit <= freed <= stock - limit + unit
        times.append(planned.predicted.iteration_time_us)
    assert times == sorted(times)


def test_relieved_groups_are_the_cheapest_and_none_could_be_relieved_less():
    work, table, stock = case("DP 4", microbatches=4)
    work = limited(work, stock * 18 // 25, zero_stage=2)
    groups, _ = groups_of(work, layer_buckets)
    offloader = Offloader(work, Rule(None, ("sharded", "host")), Timing(work, table))
    placed = offloader(groups)
    _, _, weighed = next(offloader.by_rank(groups))
    kept = [Residency(group.gradients) for group in placed]
    held = lambda ways: offloader.held(0, weighed, ways)
    assert held(kept) <= offloader.limit < held([Residency() for _ in groups])
    for index, one in enumerate(weighed):
        less = [way for way in one.ways if one.ways[way] < one.ways[kept[index]]]
        assert all(held([*kept[:index], way, *kept[index + 1 :]]) > offloader.limit for way in less)
    assert {group.gradients for group in placed} == {None, "sharded"}  # host memory would cost a copy more


def test_rules_that_are_estimated_to_be_too_slow_are_not_searched():
    work, table, stock = case("DP 4")
    problem = problem_of(limited(work, stock // 2), table, offloads=True, extrapolate=False)
    found = plan_within_memory(problem, most_us=lambda: 1e9)
    assert found == plan_within_memory(problem)
    us = judged_us(problem.workload, problem.timing, found)
    with pytest.raises(InputError, match="no rule"):
        plan_within_memory(problem, most_us=lambda: 0.9 * us)


def test_what_the_rule_leaves_goes_to_whole_parameters():
    work, table, stock = case("DP 4")
    work = limited(work, stock * 2 // 3)
    groups, _ = groups_of(work, layer_buckets)
    timing = Timing(work, table)
    offloader = Offloader(work, Rule(max(group.bytes for group in groups), ("sharded", "host", "shards")), timing)
    filled = offloader.filled(offloader(groups))
    more = filled.whole_bytes - offloader.rule.whole_bytes
    assert more > 0 and Offloader(work, filled, timing)(groups) is not None
    assert Offloader(work, filled, timing).filled(offloader(groups)) == filled  # nothing is left


def test_in_the_least_memory_there_is_one_whole_gradient_at_a_time():
    work, table, stock = case("DP 4")
    with pytest.raises(InputError) as refused:
        plan(limited(work, stock // 50), table)
    least = int(re.search(r"holds at least (\d+) bytes", str(refused.value))[1])
    planned = plan(limited(work, least), table)
    (memory,) = planned.predicted.memory
    assert memory.device_bytes["gradients"] == max(gradient_bytes(group, work) for group in planned.groups)
    assert any(group.alone for group in planned.groups)


def test_zero_stage_2_keeps_parameters_whole_and_gradients_in_shards():
    work, table, stock = case("DP 4")
    need = stock - sum(chunk.bytes for chunk in work.chunks) // 4
    planned = plan(limited(work, need, zero_stage=2, on_host=False), table)
    assert {"sharded"} <= {group.gradients for group in planned.groups}
    assert planned.predicted.memory[0].device_total_bytes <= need
    assert planned.predicted.baselines_us.keys() == {"gathers-only"}
    alone = plan(limited(work, need, zero_stage=2, on_host=False), table, compare=False)
    assert not alone.predicted.baselines_us
    assert alone.predicted.iteration_time_us >= planned.predicted.iteration_time_us * (1 - 1e-9)


def test_gradients_stay_where_tensor_parallel_ranks_add_them_later():
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", layers=6, zero_stage=3, microbatches=2)
    table = make_table(work, host_add=line(1.0, 1e4))
    free = max(memory.device_total_bytes for memory in plan(work, table).predicted.memory)
    work = replace(work, limits=Limits(device_bytes=free * 8 // 10))
    relieved, kept = plan(work, table), replace(work, keeps_gradients=True)
    assert any(group.gradients for group in relieved.groups)
    with pytest.raises(InputError, match="keeps its gradient whole"):
        match(relieved, kept)
    assert not any(group.gradients for group in plan(kept, table).groups)


def test_gradients_of_float16_are_not_added_up_where_the_hosts_optimizer_would_not_unscale_them():
    shape = dict(pp=1, vp=1, dp=2, order="no_pipeline", layers=6, microbatches=2)
    works = [make_workload(**shape, dtypes=(dtype,)) for dtype in ("bfloat16", "float16")]
    table = make_table(works[0], host_add=line(1.0, 1e4))
    stock = max(bill.memory.device_total_bytes for bill in evaluate(limited(works[0], None), table).memory)
    wide, narrow = ([limited(work, stock * percent // 100) for work in works] for percent in (70, 40))
    assert "host" in {group.gradients for group in plan(narrow[0], table).groups}
    with pytest.raises(InputError, match="limits.device_bytes = .*bytes short"):
        plan(narrow[1], table)
    planned = plan(wide[1], table)
    assert {group.gradients for group in planned.groups} == {"sharded"}
    groups = tuple(replace(group, gradients="host") for group in planned.groups)
    with pytest.raises(InputError, match="float16 in host memory would not be unscaled"):
        match(replace(planned, groups=groups, predicted=None), wide[1])


def test_shards_that_rest_in_host_memory_count_as_pinned():
    """They leave room for few host copies: the plan brings the other groups by shards."""
    work, table, stock = case("DP 4")
    work = limited(work, stock // 4)
    pinned = sum(chunk.bytes for chunk in work.chunks) * 5 // 4
    planned = plan(replace(work, limits=replace(work.limits, pinned_host_bytes=pinned)), table)
    assert max(pinned_host_bytes(planned)) <= pinned
    routes = {a.route for rank in planned.ranks for entry in rank.steps for a in entry.unshard}
    assert {"cpu", "cpu_shard"} <= routes and "host" in {group.shard_rests for group in planned.groups}


def test_what_cannot_fit_says_what_is_missing_and_what_would_help():
    work, table, stock = case("DP 4")
    with pytest.raises(InputError, match=r"holds at least \d+ bytes .* bytes short.*--optimizer-cpu-offload frees"):
        plan(limited(work, stock // 5, zero_stage=2, on_host=False), table)
    with pytest.raises(InputError, match="--zero-stage 2 frees a part of the gradients"):
        plan(limited(work, stock // 2, zero_stage=1, on_host=False), table)
    with pytest.raises(InputError, match=r"bytes short; with more pipeline or tensor parallel ranks") as refused:
        plan(limited(work, stock // 20), table)
    assert "shards" not in str(refused.value)  # they rest in host memory already


def test_a_node_without_the_host_memory_says_what_is_held_there_and_what_would_help():
    work, table, stock = case("DP 4")
    tight = limited(work, stock // 5)
    short = replace(tight, limits=replace(tight.limits, host_bytes=1000))
    helps = "a larger limits.device_bytes keeps gradients and shards on the device"
    with pytest.raises(
        InputError, match=rf"host_bytes = 1000: cannot fit by any plan .*gradients .* bytes short; {helps}"
    ):
        plan(short, table)


def test_without_pinned_memory_for_them_no_shard_rests_in_host_memory():
    work, table, stock = case("DP 4")
    tight = limited(work, stock // 2)
    planned = plan(replace(tight, limits=replace(tight.limits, pinned_host_bytes=1000)), table)
    assert {group.shard_rests for group in planned.groups} == {None} and not planned.publish


def test_a_limit_below_the_largest_layer_with_its_activations_is_refused_with_the_bytes_that_are_missing():
    work, table, _ = case("DP 4")
    chunks = tuple(replace(chunk, activation_bytes=(4096,) * chunk.num_layers) for chunk in work.chunks)
    work = limited(replace(work, chunks=chunks), 1)
    layer = max(sum(p.bytes for p in work.chunks[0].parameters if p.layer == n) for n in range(6))
    least = layer + 6 * 4096
    with pytest.raises(InputError) as refused:
        plan(replace(work, limits=Limits(device_bytes=least - 1)), table)
    need, short = map(int, re.search(r"holds at least (\d+) bytes .*, (\d+) bytes short", str(refused.value)).groups())
    assert need >= least and short == need - (least - 1) and "\n" not in str(refused.value)


@pytest.mark.parametrize("visits", some((2, 1, 4), 1))
def test_the_bound_counts_reduces_that_memory_forces_at_every_visit(visits):
    """No plan beats it: all gradients are reduced once, and at the other visits those that have no room to stay."""
    work, table, stock = case("DP 4", microbatches=visits)
    table = replace(table, reduce=line(0.0, 1.0))
    free = plan(limited(work, stock), table).predicted
    tight = plan(limited(work, stock // 4), table).predicted
    reduce_us = sum(p.bytes for chunk in work.chunks for p in chunk.parameters)
    assert free.lower_bound_us <= tight.lower_bound_us <= tight.iteration_time_us * (1 + 1e-9)
    stay = stock // 4 / reduce_us  # float32: as many bytes of gradients as of parameters; the optimizer is on the host
    assert stay < 0.7 and tight.lower_bound_us >= (1 + (visits - 1) * (1 - stay)) * reduce_us
