"""Plans of models with experts: groups of two kinds of ranks, their host copies, collectives and limits."""

import pytest
from msgspec.structs import replace
from planning_cases import WHOLE, expert_curves, line, make_table, make_workload, with_experts

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.baselines import all_cpu, all_gpu
from megatron_ext.schedule.byte_bill import byte_bill
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import memory_bill, resting_bytes
from megatron_ext.schedule.validate import InvalidSchedule, validate
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.optimizer_settings import OptimizerSettings

ONE = {"pp": 1, "vp": 1, "order": "no_pipeline", "layers": 4, "dp": 4}
TWO = {"pp": 2, "vp": 1, "order": "1f1b", "layers": 4, "dp": 4}


def case(ep: int = 2, offload: bool = False, **shape):
    """A workload with experts in every other layer, and a table with a curve for each kind of collective."""
    work = with_experts(make_workload(**shape), ep)
    work = replace(work, optimizer=OptimizerSettings(on_host=offload))
    host = {"host_step": line(10, 1e3), "host_add": line(1, 1e4), "device_step": line(3, 1e4)} if offload else {}
    return work, make_table(work, experts=expert_curves(work), **WHOLE, **host)


def ranks_by_kind(schedule, work) -> dict[bool, set[int]]:
    """The ranks of groups with parameters of experts, and of all others; a mixed group has both."""
    found: dict[bool, set[int]] = {}
    for group in schedule.groups:
        chunk = work.chunk(group.pp_rank, group.model_chunk_id)
        for parameter in chunk.parameters:
            if parameter.name in group.parameters:
                found.setdefault(parameter.expert, set()).add(group.ranks)
    return found


@pytest.mark.parametrize("policy", ["hybrid", "all-gpu", "all-cpu", "share-50", "pipeswitch", "random:1", "exact"])
@pytest.mark.parametrize("ep, shape", [(2, ONE), (4, TWO | {"zero_stage": 3, "gpus_per_node": 4})])
def test_every_policy_gives_experts_groups_of_their_own(policy, ep, shape):
    work, table = case(ep, **shape)
    schedule = validate(plan(work, table, policy=policy))
    match(schedule, work)
    assert ranks_by_kind(schedule, work) == {False: {4}, True: {4 // ep}}
    assert schedule.predicted is not None and not schedule.predicted.left_out
    assert schedule.predicted.lower_bound_us <= schedule.predicted.iteration_time_us * (1 + 1e-9)


def test_limits_of_device_bytes_are_kept_beside_offloaded_experts():
    limit = 500_000
    work, table = case(2, offload=True, **ONE | {"microbatches": 2}, zero_stage=3, device_bytes=limit)
    schedule = plan(work, table)
    assert max(max(bill.step_device_bytes) for bill in memory_bill(schedule, work)) <= limit


def test_sizes_of_experts_change_nothing_without_experts():
    work = make_workload(**ONE | {"layers": 2, "microbatches": 2}, zero_stage=3, whole_parameter_bytes=150_000)
    table = make_table(work, **WHOLE)
    spread = replace(work, parallel=replace(work.parallel, expert_model_parallel_size=2))
    assert replace(plan(spread, table), parallel=work.parallel) == plan(work, table)


def test_nodes_have_a_host_copy_of_every_expert_on_them():
    work, _ = case(2, **ONE, gpus_per_node=4)
    schedule = all_cpu(work)
    size = {group.ranks: group.bytes for group in schedule.groups}
    assert pinned_host_bytes(schedule) == [size[4] + 2 * size[2]]  # two expert-parallel ranks, two experts
    nodes = replace(schedule, parallel=replace(work.parallel, gpus_per_node=2))
    assert pinned_host_bytes(nodes) == [size[4] + 2 * size[2]] * 2
    spread = with_experts(make_workload(**ONE | {"dp": 8}, gpus_per_node=4), 4)
    schedule = all_cpu(spread)
    size = {group.ranks: group.bytes for group in schedule.groups}
    assert pinned_host_bytes(schedule) == [size[8] + 4 * size[2]] * 2


def test_shards_and_states_are_those_of_the_groups_ranks():
    work, _ = case(2, **ONE, zero_stage=3)
    groups = all_gpu(work).groups
    held, _ = resting_bytes(groups, work)
    assert held["shards"] == sum(group.bytes // group.ranks for group in groups)
    numel = {expert: sum(p.numel for p in work.chunks[0].parameters if p.expert is expert) for expert in (False, True)}
    fair = numel[False] / 4 + numel[True] / 2
    assert 4 * fair <= held["main_parameters"] <= 4 * 1.1 * fair  # of the rank that holds most
    moved = byte_bill(all_gpu(work), work)[0]
    visits = 2 * work.parallel.num_microbatches
    gathered = sum(group.bytes - group.bytes // group.ranks for group in groups)
    assert all(rank.get("gather", {}).get("network") == visits * gathered for rank in moved)


def test_collectives_of_experts_take_what_their_own_curve_says():
    work, table = case(2, **ONE)
    slower = replace(table, experts=expert_curves(work, gpu=(1000.0, 5e3)))
    schedule = all_gpu(work)
    times = [simulate(work, Timing(work, each), schedule).gather_us for each in (table, slower)]
    assert times[1] - times[0] == pytest.approx(980.0 * sum(group.ranks == 2 for group in schedule.groups))


def test_shards_of_experts_cost_what_shards_as_large_cost():
    work, table = case(2, **ONE)
    timing = Timing(work, table)
    for name in ("publish_us",):
        dense, experts = (getattr(each, name) for each in (timing, timing.among(2)))
        assert experts(0, ("cpu",), 1 << 18) == pytest.approx(dense(0, ("cpu",), 1 << 19))
    assert timing.among(4) is timing and timing.optimizer_us(1 << 20) > 0


@pytest.mark.parametrize("curve", ["gpu", "reduce"])
def test_collectives_of_experts_that_were_not_measured_are_refused_by_name(curve):
    work, table = case(2, **ONE)
    without = replace(table, experts=replace(expert_curves(work), **{curve: None}))
    with pytest.raises(InputError, match=rf"experts\.{curve}: .* among 2 ranks, other parameters among 4") as refused:
        plan(work, cost.check(without))
    assert "cost estimate" in str(refused.value)
    other = replace(table, experts=replace(expert_curves(work), ranks=1))
    with pytest.raises(InputError, match=r"experts\.ranks = 1: experts are sharded among 2 ranks here"):
        plan(work, other)


def test_a_schedule_that_takes_experts_for_dense_is_refused():
    work, table = case(2, **ONE)
    schedule = plan(work, table, policy="all-gpu")
    index = next(n for n, group in enumerate(schedule.groups) if group.ranks == 2)

    def changed(**fields):
        groups = list(schedule.groups)
        groups[index] = replace(groups[index], **fields)
        return replace(schedule, groups=tuple(groups))

    with pytest.raises(InvalidSchedule, match=rf"groups\[{index}\].ranks = 3: expected 4 data-parallel ranks or 2"):
        validate(changed(ranks=3))
    with pytest.raises(InputError, match=rf"groups\[{index}\].ranks = 4: .* sharded among 2 ranks"):
        match(changed(ranks=4), work)
    dense = make_workload(**ONE)
    with pytest.raises(InputError, match=r"expert_model_parallel_size = 2: the run has 1"):
        match(schedule, dense)
    mixed = replace(
        schedule.groups[index], parameters=(*schedule.groups[0].parameters, *schedule.groups[index].parameters)
    )
    groups = [mixed, *(group for n, group in enumerate(schedule.groups) if n not in (0, index))]
    with pytest.raises(InputError, match="mixes parameters of experts with others|in execution order"):
        match(replace(schedule, groups=tuple(groups)), work)
