"""Routes bring a group whole: what comes is what was published, and not before it was."""

import time

import faults
import pytest
import torch
import torch.distributed as dist
from negative_controls import cut_short

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.drive import DriveError
from megatron_ext.runtime.group import Clock, RankGroup
from megatron_ext.runtime.host_device import HostStream
from megatron_ext.runtime.host_pool import COPY, DRIVE, HostPool, PeerLost, Sharers
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.routes.all_gather import AllGather
from megatron_ext.runtime.routes.drive_copy import DriveCopy
from megatron_ext.runtime.routes.host_copy import HostCopy
from megatron_ext.workload.drive_reads import DriveReads


def alone(value):
    return [value]


class SlowStream(HostStream):
    def copy(self, destination, source, name=""):
        self.run(lambda: time.sleep(0.05))
        super().copy(destination, source, name)


class SlowDevice(HostDevice):
    """Its copies begin late."""

    def stream(self, name):
        return SlowStream(name)


class Copies:
    """Two groups of one rank with host copies, written by streams or by threads, and copies on the drive."""

    def __init__(self, directory, recorder=NOTHING, device=HostDevice(), by_thread=False):  # noqa: B008
        self.groups = [RankGroup(index, "chunk 0", torch.zeros(1 << 12), 0, 1) for index in range(2)]
        self.clock, self.issuer = Clock(), Issuer()
        sharers = [Sharers(self.groups, 0, 1, alone)]
        self.pool = HostPool(sharers, {0, 1}, {0, 1} if by_thread else set(), device)
        size = self.groups[0].bytes
        drive = dict(slots=1, slot_bytes=size, settings=DriveReads(), device=device)
        self.nvme = NvmePool(directory, sharers, **drive)
        copies = NodeCopies(self.pool, self.nvme, device, self.issuer, self.clock, recorder)
        self.host_copy, self.drive = HostCopy(copies), DriveCopy(copies)

    def store(self, group: RankGroup) -> None:
        """Say that both copies are there at the clock's version."""
        for where in (COPY, DRIVE):
            self.pool.flags[group.index, where][0].store(self.clock.version)

    def publish(self, value: float) -> None:
        self.clock.version += 1
        for group in self.groups:
            shard = torch.full((1 << 12,), value + group.index)
            self.pool.copies[group.index].copy_(shard)
            self.nvme.write(group, 0, shard)
            self.nvme.flush(group)
            self.store(group)

    def close(self) -> None:
        for part in (self.drive, self.nvme, self.host_copy, self.pool):
            part.close()


@pytest.fixture(params=[False, True], ids=["stream", "thread"])
def either(request, tmp_path):
    """Copies whose flags streams store, or threads."""
    made = Copies(tmp_path, by_thread=request.param)
    yield made
    made.close()


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
    group = RankGroup(0, "chunk 0", torch.zeros(256), 0, 1)
    group.shard, group.on_host = torch.arange(256.0), on_host
    work = AllGather(process_group).issue(group)
    work.wait()
    assert torch.equal(group.whole, torch.arange(256.0))


def test_the_cpu_route_brings_what_was_published_last(either):
    for value in (3.0, 5.0):
        either.publish(value)
        for group in either.groups:
            either.host_copy.issue(group).wait()
            assert (group.whole == value + group.index).all()


def test_a_copy_waits_until_its_version_is_published(either):
    either.publish(3.0)
    either.clock.version += 1  # an optimizer step, whose shards are not published yet
    group = either.groups[0]
    begin = time.monotonic()
    transfer = either.host_copy.issue(group)
    assert time.monotonic() - begin < 1  # issuing never blocks
    time.sleep(0.05)
    either.issuer.poll()
    assert (group.whole == 0).all()
    either.pool.copies[0].fill_(9.0)
    either.store(group)
    transfer.wait()
    assert (group.whole == 9.0).all()


def test_who_waits_for_a_copy_issues_what_others_wait_for(tmp_path):
    """Two groups whose copies threads write: waiting for one issues the other as well, in whatever order they come."""
    copies = Copies(tmp_path, by_thread=True)
    copies.publish(3.0)
    copies.clock.version += 1
    arrivals = [copies.host_copy.issue(group) for group in copies.groups]
    assert [arrival.issued for arrival in arrivals] == [False, False]
    for group in reversed(copies.groups):
        copies.store(group)
    arrivals[0].wait()
    copies.issuer.poll()
    assert [arrival.issued for arrival in arrivals] == [True, True] and not copies.issuer.left
    arrivals[1].wait()
    copies.close()


@faults.injected(no_wait=1)
def test_the_negative_control_copies_what_is_not_published(tmp_path):
    copies = Copies(tmp_path)
    copies.publish(3.0)
    copies.clock.version += 1
    copies.host_copy.issue(copies.groups[0]).wait()
    assert (copies.groups[0].whole == 3.0).all()  # old, and nobody waited
    copies.close()


def test_who_waits_for_a_rank_that_cannot_publish_hears_why(either):
    either.clock.version += 1
    transfer = either.host_copy.issue(either.groups[0])
    either.pool.fail(OSError("no space"))
    with pytest.raises(OSError, match="no space"):
        transfer.wait()
    either.issuer.left.clear()


def test_who_waits_for_a_rank_that_is_gone_hears_of_it(either):
    either.clock.version += 1
    transfer = either.host_copy.issue(either.groups[0])
    either.pool.blocks[0].pids = [(1 << 22) + 1]  # more than any process's number
    with pytest.raises(PeerLost, match="ended while others waited for it to publish group 0"):
        transfer.wait()


def test_a_stream_waits_once_for_each_version(copies, monkeypatch):
    waits = []
    stream = copies.host_copy.stream
    monkeypatch.setattr(stream, "wait_flag", lambda flag, value, check: waits.append((flag.row, value)))
    for value in (3.0, 5.0):
        copies.publish(value)
        for group in (*copies.groups, *copies.groups):
            copies.host_copy.issue(group).wait()
    assert waits == [(0, 2), (2, 2), (0, 3), (2, 3)]


def test_the_nvme_route_reads_into_a_slot_and_copies_out_of_it(copies):
    copies.publish(3.0)
    for group in copies.groups:  # one slot serves both, one after the other
        copies.drive.stage_in(group, 0)
        copies.drive.issue(group).wait()
        assert (group.whole == 3.0 + group.index).all()


def test_a_slot_is_filled_anew_only_when_its_last_copy_is_out(tmp_path):
    copies = Copies(tmp_path, device=SlowDevice())
    copies.publish(3.0)
    transfers = []
    for group in copies.groups:
        copies.drive.stage_in(group, 0)
        transfers.append(copies.drive.issue(group))
    for transfer in transfers:
        transfer.wait()
    assert [float(group.whole[7]) for group in copies.groups] == [3.0, 4.0]
    copies.close()


def test_a_slot_that_nobody_took_is_emptied(copies):
    copies.publish(3.0)
    copies.drive.stage_in(copies.groups[0], 0)
    copies.drive.drop()
    copies.publish(6.0)
    copies.drive.stage_in(copies.groups[1], 0)
    copies.drive.issue(copies.groups[1]).wait()
    assert (copies.groups[1].whole == 7.0).all()


def test_copies_are_recorded_on_their_links(tmp_path):
    recorder = Recorder(0)
    copies = Copies(tmp_path, recorder=recorder)
    copies.publish(3.0)
    copies.host_copy.issue(copies.groups[0]).wait()
    copies.drive.stage_in(copies.groups[1], 0)
    copies.drive.issue(copies.groups[1]).wait()
    copies.close()
    events = recorder.events()
    assert {(event.lane, event.name) for event in events} == {
        ("cpu", "unshard 0"),
        ("nvme", "stage_in 1"),
        ("cpu", "unshard 1"),
    }
    assert all(event.duration_us > 0 for event in events)


def test_a_read_that_fails_is_heard_by_who_waits(copies):
    copies.publish(3.0)
    cut_short(copies.nvme, copies.groups[0])
    copies.drive.stage_in(copies.groups[0], 0)
    with pytest.raises(DriveError, match="group 0"):
        copies.drive.issue(copies.groups[0]).wait()
