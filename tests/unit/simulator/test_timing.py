"""Route cpu_shard: two links one after the other, validated, planned where shards rest in host memory. The steps of a
group, by where they are made."""

import pytest
from msgspec.structs import replace
from planning_cases import WHOLE, line, make_table, make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.reroute import by_cpu_shard, rerouted, with_host_shards
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import buckets
from megatron_ext.workload.route import shard_pieces
from megatron_ext.workload.workload import Limits

SHAPE = dict(pp=1, vp=1, dp=4, order="no_pipeline", zero_stage=3, microbatches=2, layers=1, p2p_bytes=0)


def case(**costs):
    work = make_workload(**SHAPE)
    table = make_table(work, publish=None, forward=1.0, backward=1.0, **costs)
    gathered = plan(work, table, policy="all-gpu")
    return work, table, gathered, with_host_shards(by_cpu_shard(gathered), work)


def test_the_copy_of_the_shard_comes_before_the_all_gather():
    work, table, gathered, sharded = case(gpu=(20.0, 1e4), cpu=(10.0, 5e3))
    plain, ours = (evaluate(work, table, s, trace=True) for s in (gathered, validate(sharded)))
    lanes = {lane: [e for e in ours.events if e.lane == lane] for lane in ("cpu", "gpu")}
    assert len(lanes["cpu"]) == len(lanes["gpu"]) == sum(1 for e in plain.events if e.lane == "gpu") > 0
    size = sharded.groups[0].bytes
    copy_us, gather_us = 10.0 + size / 4 / 5e3, 20.0 + size / 1e4
    first, then = lanes["cpu"][0], lanes["gpu"][0]
    assert first.duration_us == pytest.approx(copy_us) and then.duration_us == pytest.approx(gather_us)
    assert then.start_us == pytest.approx(first.start_us + copy_us)
    assert ours.lower_bound_us <= ours.iteration_time_us


def test_a_curve_of_its_own_counts_what_the_parts_lack():
    work, table, _, sharded = case()
    size = sharded.groups[0].bytes
    parts = Timing(work, table)
    slower = replace(table, routes=replace(table.routes, cpu_shard=line(500.0, 1e3)))
    own = Timing(work, cost.check(slower))
    assert own.shard_copy_us(size) == parts.shard_copy_us(size)
    total = own.shard_copy_us(size) + own.unshard_us("cpu_shard", size)
    assert total == pytest.approx(500.0 + size / 1e3)
    assert total > parts.shard_copy_us(size) + parts.unshard_us("cpu_shard", size)


def test_it_needs_a_shard_in_host_memory():
    work, _, gathered, sharded = case()
    with pytest.raises(InputError, match="needs a shard that rests in host memory"):
        validate(by_cpu_shard(gathered))
    assert not sharded.publish  # nothing is published for it


def test_what_one_rank_holds_whole_is_copied_from_its_shard_as_fast_as_from_a_host_copy_and_not_published():
    alone = make_workload(**{**SHAPE, "dp": 1})
    table = make_table(alone, cpu=(10.0, 5e3), publish=(10.0, 5e3))
    gathered = plan(alone, table, policy="all-gpu")
    ways = by_cpu_shard(gathered), rerouted(gathered, lambda action: "cpu")
    shards, copies = (validate(with_host_shards(way, alone)) for way in ways)
    assert copies.publish and not shards.publish
    found = [evaluate(alone, table, way, trace=True) for way in (shards, copies)]
    own, other = ([event.duration_us for event in one.events if event.lane == "cpu"] for one in found)
    assert own == pytest.approx(other) and found[0].iteration_time_us < found[1].iteration_time_us


def test_instances_of_the_optimizer_reduce_the_shard_too():
    """There and back, where the table was measured without them; a table that has it says so."""
    work = make_workload(**SHAPE, instances=2)
    table = make_table(work, **WHOLE)
    alone = 20.0 + (1 << 20) / 1e4
    assert Timing(work, table).reduce_us(1 << 20) == pytest.approx(alone + 2 * (20.0 + (1 << 19) / 1e4))
    there = replace(table, metadata=replace(table.metadata, world_sizes={"num_distributed_optimizer_instances": 2}))
    assert Timing(work, there).reduce_us(1 << 20) == pytest.approx(alone)
    of_one = make_workload(**SHAPE, instances=4)
    assert Timing(of_one, make_table(of_one, **WHOLE)).left_out == ("reduce",)
    assert Timing(make_workload(**SHAPE), table).left_out == ()


@pytest.mark.parametrize("fast", ("cpu", "gpu"))
def test_it_is_planned_where_shards_have_no_room_and_the_link_to_the_host_is_slow(fast):
    """Shards do not fit the device; whole copies win over a fast link to the host, shards over a slow one."""
    work = make_workload(**{**SHAPE, "layers": 3})
    rates = {"cpu": dict(cpu=(5.0, 1e5), gpu=(50.0, 1e3)), "gpu": dict(cpu=(5.0, 1e3), gpu=(5.0, 1e5))}[fast]
    table = make_table(work, **rates)
    held = evaluate(work, table).memory[0].memory.device_total_bytes
    limited = replace(work, limits=Limits(device_bytes=held * 3 // 5))
    planned = plan(limited, table)
    hosted = {index for index, group in enumerate(planned.groups) if group.shard_rests == "host"}
    actions = [a for rank in planned.ranks for e in (rank.start, *rank.steps) for a in e.unshard]
    assert hosted and {a.route for a in actions if a.group in hosted} == {"cpu" if fast == "cpu" else "cpu_shard"}


@pytest.mark.parametrize("gpu, cpu", (((0.0, 1e4), (0.0, 5e3)), ((0.0, 1e3), (0.0, 5e3))))
def test_pieces_are_gathered_while_others_are_copied(gpu, cpu):
    """A group of 256 MiB comes in eight pieces: the slower link sets the time, and one piece of the other."""
    work = make_workload(**{**SHAPE, "hidden": 3344, "microbatches": 1})
    table = make_table(work, publish=None, forward=1.0, backward=1.0, gpu=gpu, cpu=cpu)
    gathered = stock_schedule(work, buckets)
    sharded = validate(with_host_shards(by_cpu_shard(gathered), work))
    size = sharded.groups[0].bytes
    assert len(sharded.groups) == 1 and shard_pieces(size, work.parallel.dp) == 8
    copy_us, gather_us = size / 4 / cpu[1], size / gpu[1]
    result = evaluate(work, table, sharded, trace=True)
    expected = copy_us / 8 + 7 / 8 * max(copy_us, gather_us) + gather_us / 8
    assert result.exposed_us[0] / 2 == pytest.approx(expected, rel=1e-6)
    lanes = {lane: sum(e.duration_us for e in result.events if e.lane == lane) / 2 for lane in ("cpu", "gpu")}
    assert lanes == pytest.approx({"cpu": copy_us, "gpu": gather_us})
    # A curve of its own says how long all of it takes.
    own = replace(table, routes=replace(table.routes, cpu_shard=line(0.0, 1 / (1.5 * expected / size))))
    assert evaluate(work, own, sharded).exposed_us[0] / 2 == pytest.approx(1.5 * expected, rel=1e-3)


def test_many_links_give_what_is_published_of_bandwidth_centric_partitioning():
    """A DGX-2: 3 GB/s from host memory to each of 16 GPUs at once, 48 GB/s in all, against the 12 GB/s of one link.

    Source: ZeRO-Infinity (Rajbhandari et al., SC 2021), section 6.1; 70 GB/s between GPUs from section 4. From the
    parts alone the route takes the copies of all shards, and the all-gather of the last piece.
    """
    work = make_workload(**{**SHAPE, "dp": 16, "hidden": 3344, "microbatches": 1})
    parts = dict(publish=None, forward=1.0, backward=1.0, gpu=(0.0, 70e3))
    shared, alone = (make_table(work, **parts, cpu=(0.0, rate)) for rate in (3e3, 12e3))
    whole = stock_schedule(work, buckets)
    sharded = validate(with_host_shards(by_cpu_shard(whole), work))
    size, pieces = sharded.groups[0].bytes, shard_pieces(sharded.groups[0].bytes, work.parallel.dp)
    us = evaluate(work, shared, sharded).exposed_us[0] / 2
    assert size / us == pytest.approx(1 / (1 / 48e3 + 1 / (70e3 * pieces)), rel=1e-6)
    assert 0.9 < size / us / 48e3 < 1
    one_link = Timing(work, alone).gather_us("cpu", size)
    assert 3.6 < one_link / us < 4


def test_one_table_tells_the_steps_of_a_group_apart():
    """The fastest way is not meant where the other one is asked for."""
    work, size = make_workload(), 1 << 20
    step = line(10.0, 100.0)
    ways = {cost.JOINED: line(7.0, 150.0).points, cost.CAST_ON_DEVICE: line(5.0, 200.0).points}
    both = replace(step, algorithms=ways)
    table = make_table(work, host_step=both, device_step=line(1.0, 1e4), optimizer=line(20.0, 90.0))
    timing = Timing(work, table)
    assert timing.own_host_step_us(size) == pytest.approx(10.0 + size / 100.0)
    assert timing.host_step_us(size) == pytest.approx(7.0 + size / 150.0)
    assert timing.host_step_us(size, "device") == pytest.approx(5.0 + size / 200.0)
    assert timing.device_step_us(size) == pytest.approx(1.0 + size / 1e4)
    assert timing.offers_device_step
    fewer = Timing(work, replace(table, host_step=step, device_step=None))
    assert not fewer.offers_device_step
    assert fewer.host_step_us(size, "device") == fewer.host_step_us(size) == fewer.own_host_step_us(size)
    assert fewer.left_out[1:] == ("host_step.algorithms.cast_on_device", "host_step.algorithms.joined")


def test_reads_of_states_are_not_free_where_the_copy_is_as_slow_as_the_whole_route():
    work = make_workload(**SHAPE)
    reads = [
        Timing(work, make_table(work, cpu=cpu, nvme=(20.0, 2e3))).states_us(1 << 20, 1 << 20)
        for cpu in (None, (20.0, 2e3))
    ]
    assert reads[1] == pytest.approx(reads[0]) and reads[0] > (1 << 20) / 2e3


def test_the_drive_of_each_node_gets_the_shards_of_all_nodes():
    """The curve has a rank's own shard."""
    us = {}
    for nodes in (1, 2, 4):
        shape = dict(pp=1, vp=1, dp=8, order="no_pipeline")
        work = make_workload(**shape)
        work = replace(work, parallel=replace(work.parallel, gpus_per_node=8 // nodes))
        table = make_table(work, nvme=(10.0, 1e3), publish=(0.0, 2e4))
        publish = replace(table.publish, internode=line(0.0, 1e9))
        us[nodes] = Timing(work, replace(table, publish=publish)).publish_us(0, ("nvme",), 1 << 20)
    assert us[1] == pytest.approx((1 << 20) / 2e4)
    assert [us[nodes] / us[1] for nodes in us] == pytest.approx([1, 2, 4], rel=1e-3)
