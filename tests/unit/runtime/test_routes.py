"""Routes bring a group whole: what comes is what was published, and not before it was."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.routes import CpuRoute, GpuRoute, NvmeRoute
from megatron_ext.workload.drive_reads import DriveReads


def alone(value):
    return [value]


class SlowDevice(HostDevice):
    """Its copies begin late."""

    def copy(self, destination, source, stream, after, marks=None):
        time.sleep(0.05)
        return super().copy(destination, source, stream, after, marks)


class Copies:
    """Two groups of one rank with host copies and copies on the drive."""

    def __init__(self, directory, faults=Faults(), recorder=None, device=HostDevice()):  # noqa: B008
        self.groups = [Group(index, "chunk 0", torch.zeros(1 << 12), 0, 1) for index in range(2)]
        self.clock = Clock()
        self.pool = HostPool(self.groups, {0, 1}, 0, 1, alone)
        size = self.groups[0].bytes
        drive = dict(slots=1, slot_bytes=size, settings=DriveReads(), device=device)
        self.nvme = NvmePool(directory, self.groups, 0, alone, **drive)
        self.cpu_route = CpuRoute(self.pool, device, self.clock, faults, recorder)
        self.nvme_route = NvmeRoute(self.nvme, self.pool, device, self.clock, faults, 1, recorder)

    def publish(self, value: float) -> None:
        self.clock.version += 1
        for group in self.groups:
            shard = torch.full((1 << 12,), value + group.index)
            self.pool.copies[group.index].copy_(shard)
            self.nvme.write(group, 0, shard)
            self.nvme.flush(group)
            self.pool.set_published(group, self.clock.version)

    def close(self) -> None:
        for part in (self.nvme_route, self.nvme, self.cpu_route, self.pool):
            part.close()


@pytest.fixture
def copies(tmp_path):
    made = Copies(tmp_path)
    yield made
    made.close()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("on_host", [False, True])
def test_the_gpu_route_gathers_the_shards(process_group, on_host):
    group = Group(0, "chunk 0", torch.zeros(256), 0, 1)
    group.shard, group.on_host = torch.arange(256.0), on_host
    work = GpuRoute(process_group).issue(group)
    work.wait()
    assert torch.equal(group.whole, torch.arange(256.0))


def test_the_cpu_route_brings_what_was_published_last(copies):
    for value in (3.0, 5.0):
        copies.publish(value)
        for group in copies.groups:
            copies.cpu_route.issue(group).wait()
            assert (group.whole == value + group.index).all()


def test_a_copy_waits_until_its_version_is_published(copies):
    copies.publish(3.0)
    copies.clock.version += 1  # an optimizer step, whose shards are not published yet
    group = copies.groups[0]
    begin = time.monotonic()
    transfer = copies.cpu_route.issue(group)
    assert time.monotonic() - begin < 1  # issuing never blocks
    time.sleep(0.05)
    assert (group.whole == 0).all()
    copies.pool.copies[0].fill_(9.0)
    copies.pool.set_published(group, copies.clock.version)
    transfer.wait()
    assert (group.whole == 9.0).all()


def test_the_negative_control_copies_what_is_not_published(tmp_path):
    copies = Copies(tmp_path, Faults(no_wait=1))
    copies.publish(3.0)
    copies.clock.version += 1
    copies.cpu_route.issue(copies.groups[0]).wait()
    assert (copies.groups[0].whole == 3.0).all()  # old, and nobody waited
    copies.close()


def test_who_waits_for_a_rank_that_cannot_publish_hears_why(copies):
    copies.clock.version += 1
    transfer = copies.cpu_route.issue(copies.groups[0])
    copies.pool.fail(OSError("no space"))
    with pytest.raises(OSError, match="no space"):
        transfer.wait()


def test_the_nvme_route_reads_into_a_slot_and_copies_out_of_it(copies):
    copies.publish(3.0)
    for group in copies.groups:  # one slot serves both, one after the other
        copies.nvme_route.stage_in(group, 0)
        copies.nvme_route.issue(group).wait()
        assert (group.whole == 3.0 + group.index).all()


def test_a_slot_is_filled_anew_only_when_its_last_copy_is_out(tmp_path):
    copies = Copies(tmp_path, device=SlowDevice())
    copies.publish(3.0)
    transfers = []
    for group in copies.groups:
        copies.nvme_route.stage_in(group, 0)
        transfers.append(copies.nvme_route.issue(group))
    for transfer in transfers:
        transfer.wait()
    assert [float(group.whole[7]) for group in copies.groups] == [3.0, 4.0]
    copies.close()


def test_a_slot_that_nobody_took_is_emptied(copies):
    copies.publish(3.0)
    copies.nvme_route.stage_in(copies.groups[0], 0)
    copies.nvme_route.drop()
    copies.publish(6.0)
    copies.nvme_route.stage_in(copies.groups[1], 0)
    copies.nvme_route.issue(copies.groups[1]).wait()
    assert (copies.groups[1].whole == 7.0).all()


def test_copies_are_recorded_on_their_links(tmp_path):
    recorder = Recorder(0)
    copies = Copies(tmp_path, recorder=recorder)
    copies.publish(3.0)
    copies.cpu_route.issue(copies.groups[0]).wait()
    copies.nvme_route.stage_in(copies.groups[1], 0)
    copies.nvme_route.issue(copies.groups[1]).wait()
    copies.close()
    events = recorder.events()
    assert {(event.lane, event.name) for event in events} == {
        ("cpu", "unshard 0"),
        ("nvme", "stage_in 1"),
        ("cpu", "unshard 1"),
    }
    assert all(event.duration_us > 0 for event in events)
