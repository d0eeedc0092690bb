"""The byte bill by hand, and beside what the simulator moves."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.moved_bytes import add_up, by_link, byte_differences
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.byte_bill import byte_bill
from megatron_ext.schedule.memory_bill import memory_bill, states_on_drive_bytes
from megatron_ext.schedule.user_defined_schedule import PublishGroup, StateSlots, StepSlots
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator import links
from megatron_ext.simulator.activity_kinds import CPU, GPU, HOST_ADD, NVME, PUBLISH, REDUCE
from megatron_ext.simulator.host_memory_link import STEP_BYTES
from megatron_ext.workload.bucket_layout import shard_parts
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.state_layout import region_bytes

VISITS, DP, LAYERS = 3, 2, 4


def case(zero_stage=2, on_host=False, **of_groups):
    """A schedule of all-gathers in buckets of one layer, each group changed."""
    work = make_workload(
        pp=1, vp=1, dp=DP, microbatches=VISITS, order="no_pipeline", layers=LAYERS, zero_stage=zero_stage, p2p_bytes=0
    )
    work = replace(work, optimizer=OptimizerSettings(on_host=on_host))
    schedule = stock_schedule(work, layer_buckets)
    return work, replace(schedule, groups=tuple(replace(group, **of_groups) for group in schedule.groups))


def test_a_visit_whose_gradients_are_added_on_the_host():
    """Per parameter and visit 4 bytes over the link, 12 for the addition; parameters come back in 2."""
    work, schedule = case(gradients="host")
    (bill, _), numel = byte_bill(schedule, work)[0], sum(group.bytes for group in schedule.groups) // 2 // DP
    assert bill["gradient"] == {
        "to_device": 4 * numel,
        "to_host": VISITS * 4 * numel,
        "host_memory": (VISITS + 1) * 4 * numel,
        "network": VISITS * 4 * numel,  # of the other rank's half
    }
    assert bill["host_add"] == {"host_memory": VISITS * 12 * numel}
    assert bill["gather"] == {"network": 2 * numel}
    assert by_link(bill)["host_memory"] == (VISITS * 16 + 4) * numel
    (rarer, _) = byte_bill(replace(schedule, groups=tuple(replace(g, reduce_every=2) for g in schedule.groups)), work)[
        0
    ]
    assert rarer["host_add"]["host_memory"] == 2 * 12 * numel


def test_shards_are_added_up_among_instances_of_the_optimizer():
    """Of 8 replicas in 4 instances each rank has a half, and three quarters of that come twice by a ring."""
    shape = dict(pp=1, vp=1, microbatches=VISITS, order="no_pipeline", layers=LAYERS, p2p_bytes=0)
    bills, held = [], []
    for how in (dict(dp=2), dict(dp=8, instances=4)):
        work = make_workload(**shape, **how)
        schedule = validate(stock_schedule(work, layer_buckets))
        bills.append(byte_bill(schedule, work)[0])
        held.append(memory_bill(schedule, work)[0].memory)
    one, four = bills
    assert len(one) == len(four) == 2 and held[0] == held[1] and one[0]["gather"] == four[0]["gather"]
    assert four[0]["gradient"]["network"] == one[0]["gradient"]["network"] * (1 + 2 * 3 / 4)


@pytest.mark.parametrize("cast, link_bytes", [("host", 2), ("device", 4)])
def test_the_hosts_step_moves_what_the_simulator_takes(cast, link_bytes):
    """With the cast on the device 16 bits are not written, and fp32 leaves."""
    work, schedule = case(on_host=True)
    schedule = replace(schedule, step_slots=StepSlots(slots=2, slot_bytes=1 << 20, cast=cast))
    (bill, _), numel = byte_bill(schedule, work)[0], sum(group.bytes for group in schedule.groups) // 2 // DP
    assert bill["gradient"]["to_host"] == 4 * numel and bill["shard"]["to_device"] == link_bytes * numel
    assert by_link(bill)["host_memory"] == STEP_BYTES * numel


def test_each_byte_crosses_a_link_once_however_a_schedule_says_so():
    """What rests on the host makes no byte of a gradient cross twice."""
    for of_groups in ({"gradients": "host"}, {"gradients": "host", "states_rest": "nvme"}, {}):
        work, schedule = case(on_host=True, **of_groups)
        (bill, _), numel = byte_bill(schedule, work)[0], sum(group.bytes for group in schedule.groups) // 2 // DP
        assert bill["gradient"]["to_host"] == (VISITS if of_groups else 1) * 4 * numel
        assert "to_device" not in bill["gradient"]


def test_states_on_the_drive_begin_at_sectors():
    work, schedule = case(on_host=True, states_rest="nvme")
    numels = [parameter.numel for parameter in work.chunks[0].parameters][: len(schedule.groups[0].parameters)]
    parts = shard_parts(numels, DP)
    assert sum(map(len, parts)) > len(numels)  # one lies in both
    bills = byte_bill(schedule, work)[0]
    for bill, own in zip(bills, parts):
        size = sum(region_bytes(numel, 2) for numel in own)
        assert bill["states"] == {
            name: n * LAYERS * size for name, n in [("drive_read", 1), ("drive_write", 1), ("host_memory", 2)]
        }
    held = states_on_drive_bytes(schedule.groups, work)
    assert held == max(bill["states"]["drive_read"] for bill in bills)


def test_differences_are_said_by_kind_and_link():
    bill = add_up([("gather", "to_device", 5), ("gather", "network", 3), ("gather", "network", 3)])
    assert bill == {"gather": {"to_device": 5, "host_memory": 5, "network": 6}}
    assert byte_differences(bill, bill) == []
    assert byte_differences(bill, {"gather": {"to_device": 5, "host_memory": 5}, "step": {"host_memory": 1}}) == [
        ("gather", "network", 6, 0),
        ("step", "host_memory", 0, 1),
    ]


def simulated(work, schedule, monkeypatch) -> dict:
    """What the engine's links move, by kind and link."""
    rows, gradient = [], work.optimizer.gradient_item_bytes / 2 / DP

    class Seen(links.Activity):
        def __init__(self, rank, kind, size, us, now, item, memory=0.0, slack=1.0):
            super().__init__(rank, kind, size, us, now, item, memory, slack)
            if kind == GPU:
                rows.append(("gather", "network", size - size // DP))
            elif kind in (CPU, NVME):
                rows.append(("gather", "to_device" if kind == CPU else "drive_read", size))
            elif kind == REDUCE:
                rows.append(
                    ("gradient", "network", round(size * work.optimizer.gradient_item_bytes / 2 * (DP - 1) / DP))
                )
            elif kind == PUBLISH and len(item) == 4:
                rows.append(("gradient", "to_host", round(size * gradient)))
            elif kind == PUBLISH:
                rows.append(("publish", "host_memory", round(memory * us)))
            elif kind == HOST_ADD:
                rows.append(("host_add", "host_memory", round(memory * us)))

    monkeypatch.setattr(links, "Activity", Seen)
    table = make_table(work, nvme=(10.0, 5e3), host_add=line(1.0, 1e4), reduce=line(1.0, 1e4))
    evaluate(work, replace(table, host_memory=cost.HostMemory(bytes_per_s=1e12)), validate(schedule))
    return add_up(rows)


def with_all_by_cpu(schedule):
    """Every group is published to a host copy and comes from there."""
    to = tuple(PublishGroup(group=index, to=("cpu",)) for index in range(LAYERS))
    by_copy = lambda entry: replace(entry, unshard=tuple(replace(a, route="cpu") for a in entry.unshard))
    rank = schedule.ranks[0]
    rank = replace(rank, start=by_copy(rank.start), steps=tuple(map(by_copy, rank.steps)))
    return replace(schedule, publish=to, ranks=(rank,))


@pytest.mark.parametrize("kept", ["host", "sharded"])
def test_the_simulator_moves_what_is_billed(kept, monkeypatch):
    work, schedule = case(gradients=kept)
    to = tuple(PublishGroup(group=index, to=("cpu",)) for index in range(LAYERS))
    by_copy = tuple(
        replace(entry, unshard=tuple(replace(a, route="cpu") if a.group % 2 else a for a in entry.unshard))
        for entry in schedule.ranks[0].steps
    )
    schedule = replace(schedule, publish=to, ranks=(replace(schedule.ranks[0], steps=by_copy),))
    (bill, _), moved = byte_bill(schedule, work)[0], simulated(work, schedule, monkeypatch)
    bill["gradient"].pop("to_device", None)  # for the optimizer's step, whose time has it
    assert moved["gather"] == bill["gather"]
    assert moved["publish"]["host_memory"] == bill["publish"]["host_memory"] == bill["publish"]["to_host"]
    for link in ("to_host", "network"):
        assert moved["gradient"].get(link) == bill["gradient"].get(link)
    assert moved.get("host_add") == bill.get("host_add")


@pytest.mark.parametrize("of_groups, passes", [({}, 3), ({"shard_rests": "host", "states_rest": "nvme"}, 2)])
def test_the_simulator_publishes_from_host_memory_as_billed(of_groups, passes, monkeypatch):
    """From the host's optimizer 16 bits are made of fp32, from a shard in host memory they are copied."""
    work, schedule = case(zero_stage=3, on_host=True, **of_groups)
    schedule = with_all_by_cpu(schedule)
    if of_groups:
        schedule = replace(schedule, state_slots=StateSlots(slots=2, slot_bytes=1 << 20))
    (bill, _), moved = byte_bill(schedule, work)[0], simulated(work, schedule, monkeypatch)
    own = sum(group.bytes for group in schedule.groups) // DP
    assert bill["publish"]["host_memory"] == pytest.approx(passes * own, rel=0.01)  # fp32 has no padding
    assert moved["publish"]["host_memory"] == passes * own


def test_the_simulator_copies_shards_as_billed(monkeypatch):
    work, schedule = case(zero_stage=3)
    schedule = with_host_shards(by_cpu_shard(schedule), work)
    (bill, _), moved = byte_bill(schedule, work)[0], simulated(work, schedule, monkeypatch)
    assert moved["gather"] == bill["gather"] and bill["gather"]["to_device"] * (DP - 1) == bill["gather"]["network"]
