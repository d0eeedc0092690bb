"""What may be pinned together: host copies, staging slots, and the buffers through which shards go to the drive."""

from types import SimpleNamespace

from msgspec.structs import replace
from planning_cases import make_workload

from megatron_ext.planner.place_choices import hosted_groups, staged_groups
from megatron_ext.planner.stock import groups_of
from megatron_ext.schedule.footprint import pinned_need
from megatron_ext.workload.bucket_rules import layer_buckets


def test_host_copies_leave_room_for_what_passes_to_the_drive():
    work = make_workload(pp=1, vp=1, dp=2, microbatches=1, order="no_pipeline", layers=8)
    groups, _ = groups_of(work, layer_buckets)
    blocks, size = SimpleNamespace(groups=groups), groups[0].bytes
    assert {group.bytes for group in groups} == {size}
    # A slot for each of two ranks, two buffers of a shard for each, and three host copies, less a byte.
    limits = dict(nvme_slots=1, nvme_slot_bytes=size, pinned_host_bytes=2 * size + 2 * size + 3 * size - 1)
    work = replace(work, limits=replace(work.limits, **limits))
    hosted = hosted_groups(work, blocks)
    assert len(hosted) == 2 and max(pinned_need(work, groups, hosted, staged_groups(work, blocks, hosted))) == 6 * size
    assert len(staged_groups(work, blocks, hosted)) == 6
