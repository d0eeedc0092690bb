"""Bytes that a schedule promises, against small schedules counted by hand."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from parallel_sizes import sized
from planning_cases import make_workload

from megatron_ext.planner.assemble import Freed, Placed, assemble
from megatron_ext.planner.stock import groups_of
from megatron_ext.schedule.footprint import (
    actions_in_order,
    bounce_bytes,
    device_peaks,
    over_limit,
    pinned_host_bytes,
    slot_bytes,
)
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.bucket_rules import layer_buckets

ONE = dict(pp=1, vp=1, dp=2, microbatches=1, order="no_pipeline", layers=3)


def schedule_of(unshards, reshards=(), *, route="gpu", **shape):
    """A schedule of one rank with one group a layer: steps 0 (forward) and 1 (backward)."""
    work = make_workload(**(ONE | shape))
    groups, _ = groups_of(work, layer_buckets)
    placed = [Placed(group, route, *where) for group, *where in unshards]
    return assemble(work, groups, [placed], [[Freed(*freed) for freed in reshards]], planner="test")


def test_at_zero_stage_1_all_parameters_count_from_the_begin():
    schedule = schedule_of([(n, -1, 0) for n in range(3)])
    assert device_peaks(schedule) == [sum(group.bytes for group in schedule.groups)]


def test_a_group_counts_from_its_issue_to_its_reshard():
    """Layer 0 at the start, 1 issued in the forward; both freed behind it; then all three in the backward."""
    both = schedule_of(
        [(0, -1, 0), (1, 0, 0), (2, 0, 0), (2, 1, 1), (1, 1, 1), (0, 1, 1)], [(0, 0), (1, 0), (2, 0)], zero_stage=3
    )
    size = both.groups[0].bytes
    assert {group.bytes for group in both.groups} == {size}
    assert device_peaks(both) == [3 * size]


def test_within_a_step_groups_come_and_go_by_layer():
    """One layer at a time in the forward (ascending), and in the backward (descending)."""
    unshards = [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 0, 2), (2, 1, 1, 2), (1, 1, 1, 1), (0, 1, 1, 0)]
    reshards = [(n, 0, n) for n in range(3)] + [(n, 1, n) for n in (2, 1, 0)]
    schedule = schedule_of(unshards, reshards, zero_stage=3)
    assert device_peaks(schedule) == [schedule.groups[0].bytes]
    forward, backward = schedule.ranks[0].steps
    assert [action.group for action in actions_in_order(forward)] == [0, 0, 1, 1, 2, 2]
    assert [action.group for action in actions_in_order(backward)] == [2, 2, 1, 1, 0, 0]


def test_host_copies_count_once_a_node_and_slots_once_a_rank():
    schedule = schedule_of([(n, -1, 0) for n in range(3)], route="cpu")
    size = sum(group.bytes for group in schedule.groups)
    assert pinned_host_bytes(schedule) == [size]  # two replicas share it
    apart = replace(schedule, parallel=replace(schedule.parallel, gpus_per_node=1))
    assert pinned_host_bytes(apart) == [size, size]


def test_a_slot_is_as_large_as_the_largest_staged_group_or_as_its_limit_says():
    schedule = schedule_of([(n, -1, 0) for n in range(3)], route="cpu")
    assert slot_bytes(schedule, 0) == 0
    staged = replace(
        schedule,
        publish=tuple(replace(entry, to=("nvme",)) for entry in schedule.publish),
        limits=replace(schedule.limits, nvme_slots=2),
    )
    size = schedule.groups[0].bytes
    assert slot_bytes(staged, 0) == size
    # Two slots of each of two replicas, whose shards pass through two buffers.
    assert pinned_host_bytes(staged) == [2 * 2 * size + 2 * size]
    held = memory_bill(staged, make_workload(**ONE))[0].memory.host_bytes
    assert held["staging_slots"] == 2 * size + size  # of each rank
    both = replace(staged, publish=tuple(replace(entry, to=("cpu", "nvme")) for entry in staged.publish))
    assert pinned_host_bytes(both) == [2 * 2 * size + 3 * size]
    larger = replace(staged, limits=replace(staged.limits, nvme_slot_bytes=3 * size))
    assert slot_bytes(larger, 0) == 3 * size and pinned_host_bytes(larger) == [2 * 2 * 3 * size + 2 * size]


def test_shards_of_other_nodes_pass_to_the_drive_as_well():
    group = SimpleNamespace(bytes=1 << 20, ranks=8, pp_rank=0)
    sizes = [bounce_bytes(group, sized(dp=8, gpus_per_node=ranks, microbatches=1)) for ranks in (8, 4, 1)]
    assert sizes == [2 << 17, 4 << 17, 16 << 17]


def test_a_shard_that_rests_on_the_host_is_pinned_by_its_rank():
    schedule = schedule_of([(n, -1, 0) for n in range(3)])
    resting = replace(schedule, groups=tuple(replace(group, shard_rests="host") for group in schedule.groups))
    assert pinned_host_bytes(schedule) == [0]
    assert pinned_host_bytes(resting) == [sum(group.bytes for group in schedule.groups)]


@pytest.mark.parametrize(("limit", "over"), [(None, []), (9, []), (8, [(1, 9, 1)]), (4, [(0, 5, 1), (1, 9, 5)])])
def test_needs_over_a_limit_say_how_much_is_too_many(limit, over):
    assert list(over_limit([5, 9, 2], limit)) == over
