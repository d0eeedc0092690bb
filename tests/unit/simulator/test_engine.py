"""The engine against cases that can be worked out by hand."""

import msgspec
import pytest
from planning_cases import flat, make_table, make_workload, table_of

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import Freed, Placed, assemble
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import groups_of, stock_schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets


def one_rank(zero_stage=1, microbatches=1, layers=2, **more):
    return make_workload(
        pp=1, vp=1, dp=2, microbatches=microbatches, layers=layers, order="no_pipeline", zero_stage=zero_stage, **more
    )


def by_layer(work, placed, freed=None):
    """A schedule of layer groups: group n is layer n of the one chunk."""
    groups, _ = groups_of(work, layer_buckets)
    return validate(assemble(work, groups, [placed], [freed or []], planner="test"))


def test_second_layer_arrives_while_the_first_computes():
    """Gathers of 100 each in one queue; 50 us of forward a layer: waits 100, then 50."""
    work = one_rank()
    result = evaluate(work, table_of(work), by_layer(work, [Placed(0, "gpu", -1, 0), Placed(1, "gpu", -1, 0)]))
    assert result.iteration_time_us == pytest.approx(100 + 50 + 50 + 50 + 200)
    assert result.exposed_us == pytest.approx((150,)) and result.busy_us["gpu"] == pytest.approx(200)
    assert result.group_exposed_us == pytest.approx({0: 100, 1: 50})


def test_issuing_keeps_the_thread_as_long_as_its_route_s_call():
    """An all-gather's call of 70 us, a host copy's own of 5; where copies were not told apart, 70 too."""
    work = one_rank()
    table = table_of(work, cpu=20.0, publish=1.0, group_overhead=cost.GroupOverhead(call_us=70.0))
    own = msgspec.structs.replace(
        table.routes.cpu,
        points=tuple(msgspec.structs.replace(point, issued_us=5.0) for point in table.routes.cpu.points),
    )
    told = msgspec.structs.replace(table, routes=msgspec.structs.replace(table.routes, cpu=own))
    # Both are called for before the first is waited for; the second is complete before layer 1 computes.
    for given, route, call in ((table, "gpu", 70), (told, "gpu", 70), (table, "cpu", 70), (told, "cpu", 5)):
        schedule = by_layer(work, [Placed(0, route, -1, 0), Placed(1, route, 0, 0)])
        result = evaluate(work, given, schedule, trace=True)
        assert [event.duration_us for event in result.events if event.lane == "issue"] == [call, call], (route, call)
        if route == "cpu":
            assert result.iteration_time_us == pytest.approx(max(2 * call, 1 + 20) + 100 + 200)


def test_a_gather_slows_compute_while_it_lasts():
    work = one_rank()
    schedule = by_layer(work, [Placed(0, "gpu", -1, 0), Placed(1, "gpu", -1, 0)])
    plain = table_of(work, forward=400.0)
    assert evaluate(work, plain, schedule).iteration_time_us == pytest.approx(100 + 2 * 200 + 200)
    row = cost.Contention(measured="compute", busy="gpu", slowdown=3.0)
    table = msgspec.structs.replace(plain, contention=(row,))
    result = evaluate(work, table, schedule)
    # Layer 0 computes at a third of its speed from 100 until layer 1 has arrived at 200.
    assert result.iteration_time_us == pytest.approx(700 + 200 / 3)
    assert result.iteration_time_us >= result.lower_bound_us
    # A bound that was wrong would show.
    assert simulate(work, Timing(work, table), schedule, bound_us=800.0).lower_bound_us == 800.0


def test_two_links_run_at_once_and_cpu_waits_for_its_publishing():
    work = one_rank()
    schedule = by_layer(work, [Placed(0, "gpu", -1, 0), Placed(1, "cpu", -1, 0)])
    result = evaluate(work, table_of(work, cpu=130.0, publish=30.0), schedule)
    # Layer 0 computes 100-150; layer 1 is published at 30 and arrives at 160.
    assert result.iteration_time_us == pytest.approx(160 + 50 + 200)
    assert result.busy_us["publish"] == pytest.approx(30)


def test_overlap_slows_by_the_measured_rows_only_while_it_lasts():
    work = one_rank()
    schedule = by_layer(work, [Placed(0, "gpu", -1, 0), Placed(1, "cpu", -1, 0)])
    rows = (
        cost.Contention(measured="gpu", busy="cpu", slowdown=1.5),
        cost.Contention(measured="cpu", busy="gpu", slowdown=2.0),
    )
    result = evaluate(work, table_of(work, cpu=100.0, publish=1e-6, contention=rows), schedule, trace=True)
    ends = {event.lane: event.start_us + event.duration_us for event in result.events if event.lane in ("gpu", "cpu")}
    # gpu needs 150 beside cpu; cpu has done 75 of 100 by then and goes on alone.
    assert ends == pytest.approx({"gpu": 150, "cpu": 175}, rel=1e-6)


def test_a_nic_on_the_pcie_link_shares_it():
    work = one_rank()
    schedule = by_layer(work, [Placed(0, "gpu", -1, 0), Placed(1, "cpu", -1, 0)])
    shared = table_of(work, cpu=100.0, publish=1e-6, topology=cost.Topology(nic_shares_pcie=True))
    result = evaluate(work, shared, schedule, trace=True)
    assert max(e.start_us + e.duration_us for e in result.events if e.lane in ("gpu", "cpu")) == pytest.approx(200)


def test_whole_iteration_has_reduction_and_optimizer_where_they_are_known():
    work = one_rank()
    bare = evaluate(work, table_of(work))
    whole = evaluate(work, table_of(work, reduce=flat(70.0), optimizer=flat(40.0)))
    assert whole.iteration_time_us == pytest.approx(bare.iteration_time_us + 110)
    assert bare.left_out == ("reduce", "optimizer") and whole.left_out == ()


def test_gradients_are_reduced_group_by_group_while_the_backward_goes_on():
    """Two layers of 100 us backward. In groups of a layer the upper one's reduction of 70 us is hidden
    behind the lower layer's backward; a group of both is complete only at the end."""
    work = one_rank(microbatches=2)
    table = table_of(work, reduce=flat(70.0))
    compute = 2 * (100 + 200)
    layers = by_layer(work, [Placed(0, "gpu", -1, 0), Placed(1, "gpu", -1, 0)])
    result = evaluate(work, table, layers, trace=True)
    reduces = [(e.start_us, e.name) for e in result.events if e.lane == "reduce"]
    end = result.exposed_us[0] + compute
    assert [(start, name) for start, name in reduces] == [(pytest.approx(end - 100), "1"), (pytest.approx(end), "0")]
    assert result.iteration_time_us == pytest.approx(end + 70) and result.lower_bound_us <= result.iteration_time_us
    whole = evaluate(work, table)
    assert whole.iteration_time_us == pytest.approx(100 + compute + 70)
    slow = evaluate(work, table_of(work, reduce=flat(130.0)), layers)
    assert slow.iteration_time_us == pytest.approx(end - 100 + 2 * 130)  # one after the other


def test_an_all_gather_waits_behind_gradients_that_are_reduced_over_its_communicator():
    """Layer 1 has computed backward at 350 us, and 250 us of reducing begin; layer 0's all-gather of 100 us,
    issued then, comes behind them, issued before them or from the host it does not. A trace has it from when it is
    issued, as that of a run."""
    work = one_rank(zero_stage=3)
    table = table_of(work, cpu=100.0, publish=1e-6, reduce=flat(250.0))
    end, alone = {}, {"gpu": 100.0, "reduce": 250.0}
    for route, at in (("gpu", 0), ("gpu", 1), ("cpu", 0)):
        placed = [Placed(0, "gpu", -1, 0), Placed(1, "gpu", -1, 0), Placed(0, route, 1, 1, at=at)]
        result = evaluate(
            work, table, by_layer(work, placed, [Freed(0, 0, at=0), Freed(1, 1), Freed(0, 1)]), trace=True
        )
        end[route, at] = result.iteration_time_us
        busy = sorted((e.end_us, e.lane, e.start_us) for e in result.events if e.lane in alone)
        assert all(first[0] + alone[lane] <= end + 1e-6 for first, (end, lane, _) in zip(busy, busy[1:]))
        if (route, at) == ("gpu", 0):
            assert (600.0 + 100.0, "gpu", 350.0) in [(pytest.approx(end), lane, begin) for end, lane, begin in busy]
    assert end == pytest.approx(
        {("gpu", 0): 600 + 100 + 100 + 250, ("gpu", 1): 350 + 2 * 250, ("cpu", 0): 350 + 2 * 250}
    )


@pytest.mark.parametrize("slowdown, end", [(None, 1050.0), (1.0, 950.0), (1.5, 1000.0)])
def test_an_all_gather_of_shards_from_the_host_shares_the_network_with_reduces(slowdown, end):
    """Its own communicator waits for none: layer 0's shard is copied from 400 to 500 us, beside 250 us of reducing, and
    gathered in 100 more, in 150 where it is slowed as much. Where that was not measured it takes twice as long. Then
    layer 0 takes 100 us and its reduce 250, behind the first one."""
    work = one_rank(zero_stage=3)
    pairs = [("gpu", "reduce"), ("reduce", "gpu")] if slowdown is not None else []
    rows = tuple(cost.Contention(measured=a, busy=b, slowdown=slowdown) for a, b in pairs)
    table = table_of(work, cpu=100.0, publish=1e-6, reduce=flat(250.0), contention=rows)
    placed = [Placed(0, "cpu_shard", -1, 0), Placed(1, "gpu", -1, 0), Placed(0, "cpu_shard", 1, 1, at=0)]
    (first, *others), _ = groups_of(work, layer_buckets)
    groups = [msgspec.structs.replace(first, shard_rests="host"), *others]
    freed = [Freed(0, 0, at=0), Freed(1, 1), Freed(0, 1)]
    schedule = validate(assemble(work, groups, [placed], [freed], planner="test"))
    assert evaluate(work, table, schedule).iteration_time_us == pytest.approx(end)


def test_a_staging_slot_is_reused_only_when_it_is_empty():
    """nvme takes 300 of which the last 100 are the copy from the slot: with one slot the second
    read waits for the first copy, with two it does not. A read that takes 1.5 times as long beside a copy gets 2/3 of
    the copy's 100 us done in it, and the copy is no longer for it."""
    ends = {}
    beside = (cost.Contention(measured="nvme", busy="cpu", slowdown=1.5),)
    for slots, rows in ((1, ()), (2, ()), (1, beside), (2, beside)):
        work = one_rank(zero_stage=1, microbatches=2, nvme_slots=slots)
        second = Placed(1, "nvme", 0, 0, slot=slots - 1, stage=-1 if slots == 2 else 0)
        schedule = by_layer(work, [Placed(0, "nvme", -1, 0, slot=0, stage=-1), second])
        table = table_of(work, cpu=100.0, nvme=300.0, publish=1e-6, contention=rows)
        result = evaluate(work, table, schedule, trace=True)
        ends[slots, len(rows)] = max(e.start_us + e.duration_us for e in result.events if e.lane == "cpu")
        assert result.busy_us["cpu"] == pytest.approx(2 * 100)
    assert ends == pytest.approx(
        {(1, 0): 600, (2, 0): 500, (1, 1): 600, (2, 1): 200 + 100 + (200 - 100 / 1.5) + 100}, rel=1e-6
    )


def test_zero_stage_3_brings_and_frees():
    work = one_rank(zero_stage=3, layers=1)
    group = groups_of(work, layer_buckets)[0][0].bytes
    twice = by_layer(work, [Placed(0, "gpu", 0, 0), Placed(0, "gpu", 1, 1)], [Freed(0, 0), Freed(0, 1)])
    once = by_layer(work, [Placed(0, "gpu", 0, 0)])
    assert evaluate(work, table_of(work), twice).iteration_time_us == pytest.approx(500)
    assert evaluate(work, table_of(work), once).iteration_time_us == pytest.approx(400)
    assert evaluate(work, table_of(work), once).peak_bytes["device"] == (group,)


def test_stock_rule_looks_ahead_by_chunks():
    """Chunks 0 and 1 before warm-up; chunk 2 at the first micro-batch of chunk 1."""
    work = make_workload(pp=2, vp=3, microbatches=4)
    schedule = validate(stock_schedule(work))
    rank = schedule.ranks[0]
    assert [schedule.groups[a.group].model_chunk_id for a in rank.start.unshard] == [0, 1]
    later = [(entry.step, schedule.groups[a.group].model_chunk_id) for entry in rank.steps for a in entry.unshard]
    assert later == [("2F0", 2)]


def test_stock_rule_without_interleaving_gathers_on_demand():
    work = make_workload(pp=2, vp=1, order="1f1b")
    schedule = validate(stock_schedule(work))
    assert all(not rank.start.unshard and len(rank.steps[0].unshard) == 1 for rank in schedule.ranks)


def test_messages_between_stages_take_their_time_and_queue():
    work = make_workload(pp=2, vp=1, microbatches=1, order="gpipe")
    table = make_table(work, gpu=(1.0, 1e9), p2p=(50.0, 1e9))
    result = evaluate(work, table)
    assert result.iteration_time_us == pytest.approx(600 + 2 * 50, abs=5)


def test_a_missing_figure_is_an_error():
    work = make_workload()
    with pytest.raises(InputError, match="p2p"):
        evaluate(work, make_table(work, p2p=None))
    with pytest.raises(InputError, match="compute"):
        evaluate(work, msgspec.structs.replace(make_table(work), compute=()))
    with pytest.raises(InputError, match="routes.gpu"):
        evaluate(work, make_table(work, gpu=None))


def test_padding_may_carry_a_group_just_past_the_largest_measured_size():
    work = one_rank(layers=1)
    size = sum(group.bytes for group in groups_of(work)[0])

    def table(largest: int):
        points = (cost.Point(size_bytes=1, p50_us=1.0), cost.Point(size_bytes=largest, p50_us=100.0))
        return msgspec.structs.replace(table_of(work), routes=cost.Routes(gpu=cost.Curve(points=points)))

    assert evaluate(work, table(size - 128)).busy_us["gpu"] == pytest.approx(100, rel=0.02)
    with pytest.raises(InputError, match="outside the measured range"):
        evaluate(work, table(size // 2))
