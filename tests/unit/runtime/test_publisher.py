"""The publisher writes fresh shards: in order, behind the reads of the last iteration, with a flag behind each."""

import time

import faults
import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import Clock, RankGroup
from megatron_ext.runtime.host_pool import DRIVE, HostPool, PeerLost, Sharers
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.node_exchange import IN_FLIGHT, Arriving, NodeExchange
from megatron_ext.runtime.publisher import Publisher, Target, by_thread
from megatron_ext.runtime.recorder import NOTHING, Recorder


class OneRank:
    """The only rank of a node, of two in all."""

    def __init__(self, offloaded=None, nodes=None, drive=None, host=True, recorder=NOTHING):
        self.groups = [RankGroup(index, "chunk 0", torch.full((256,), 1.0 + index), 0, 2) for index in range(3)]
        targets = [Target(group, host, drive is not None, offloaded, nodes) for group in self.groups]
        self.device, hosted = HostDevice(), {0, 1, 2} if host else set()
        self.pool = HostPool(
            [Sharers(self.groups, 0, 1, lambda value: [value])], hosted, by_thread(targets), self.device
        )
        self.clock, self.issuer = Clock(), Issuer()
        copies = NodeCopies(self.pool, drive, self.device, self.issuer, self.clock, recorder)
        self.publisher = Publisher(targets, copies)

    def publish(self, iterations: int = 0, by_optimizer: bool = True) -> None:
        self.clock.version += 1
        self.publisher.updated(iterations, by_optimizer)

    def versions(self, where: int = 0) -> list[int]:
        return [self.pool.published(group, where)[0] for group in self.groups]

    def close(self) -> None:
        self.publisher.close()
        self.pool.close()


class OtherNode(NodeExchange):
    """An exchange with one counterpart, all of whose elements are 9."""

    def __init__(self):
        self.dp_ranks = (0, 1)

    def begin(self, shards, dp_rank):
        shards[1].fill_(9.0)
        return Arriving((), self.dp_ranks, tuple(shards))


@pytest.fixture
def rank():
    made = OneRank()
    yield made
    made.close()


def test_every_shard_lies_in_its_part_of_the_host_copy_before_its_flag_is_set(rank):
    rank.publish()
    rank.publisher.settled()
    assert rank.versions() == [2, 2, 2]
    for group in rank.groups:
        copy = rank.pool.copies[group.index]
        assert torch.equal(copy[:128], group.shard) and not copy[128:].any()  # the other rank's half


def test_what_comes_from_another_node_is_received_in_its_place_in_the_host_copy():
    rank = OneRank(nodes=OtherNode())
    rank.publish()
    rank.publisher.settled()
    for group in rank.groups:
        copy = rank.pool.copies[group.index]
        assert torch.equal(copy[:128], group.shard) and (copy[128:] == 9).all()
    rank.close()


def test_what_an_iteration_reads_is_overwritten_only_when_all_have_ended_it(rank):
    rank.publish()
    rank.publisher.settled()
    with torch.no_grad():
        rank.groups[0].whole.fill_(50.0)
    rank.publish(iterations=1)  # this rank has ended one, its flag does not say so yet
    time.sleep(0.05)
    assert rank.versions() == [2, 2, 2] and rank.pool.copies[0][0] == 1.0
    rank.publisher.end_reads(1)
    rank.publisher.settled()
    assert rank.versions() == [3, 3, 3] and rank.pool.copies[0][0] == 50.0


def test_shards_that_the_optimizer_holds_on_the_host_are_rounded_from_there():
    pieces = [(0, torch.full((100,), 0.5)), (100, torch.full((20,), 0.25))]
    rank = OneRank(offloaded=lambda: pieces)
    rank.publish()
    rank.publisher.settled()
    copy = rank.pool.copies[1]
    assert (copy[:100] == 0.5).all() and (copy[100:120] == 0.25).all()
    rank.close()


def test_values_that_the_host_s_optimizer_does_not_know_come_from_the_shards():
    rank = OneRank(offloaded=lambda: [(0, torch.full((128,), 0.5))])
    rank.publish(by_optimizer=False)
    rank.publisher.settled()
    assert rank.versions() == [2, 2, 2]
    assert [float(copy[0]) for copy in rank.pool.copies.values()] == [1.0, 2.0, 3.0]
    rank.close()


class Drive:
    """Takes time to write, and keeps what was written."""

    def __init__(self):
        self.written, self.flushed = [], []

    def write(self, group, dp_rank, shard) -> None:
        time.sleep(0.01)
        self.written.append((group.index, dp_rank, float(shard[0]), float(shard[-1])))

    def flush(self, group) -> None:
        self.flushed.append(group.index)


@pytest.mark.parametrize("offloaded", [None, lambda: [(0, torch.full((100,), 0.5))]], ids=["device", "host"])
def test_what_has_a_copy_on_the_drive_alone_bounces_through_memory_that_is_used_again(offloaded):
    assert IN_FLIGHT < 3
    drive = Drive()
    rank = OneRank(drive=drive, host=False, offloaded=offloaded)
    for value in (5.0, 6.0):
        with torch.no_grad():
            for group in rank.groups:
                group.whole.fill_(value + group.index)
        rank.publish()
        rank.publisher.settled()
        here = [(index, 0, value + index, value + index) for index in range(3)]
        assert drive.written == (here if offloaded is None else [(index, 0, 0.5, 0.0) for index in range(3)])
        assert drive.flushed == [0, 1, 2]
        drive.written.clear(), drive.flushed.clear()
    assert rank.versions(DRIVE) == [3, 3, 3] and rank.pool.copies == {}
    rank.close()


def test_a_shard_that_rests_in_host_memory_goes_to_the_drive_from_there():
    drive = Drive()
    rank = OneRank(drive=drive, host=False)
    for group in rank.groups:
        group.on_host = True
    rank.publish()
    rank.publisher.settled()
    assert [row[0] for row in drive.written] == [0, 1, 2] and rank.versions(DRIVE) == [3 - 1] * 3
    rank.close()


@pytest.mark.parametrize("by_thread", [False, True])
def test_writes_are_recorded_one_behind_the_other(by_thread):
    recorder = Recorder(0)
    rank = OneRank(offloaded=(lambda: [(0, torch.ones(128))]) if by_thread else None, recorder=recorder)
    rank.publish()
    rank.publisher.settled()
    rank.close()
    rows = [event for event in recorder.events() if event.lane == "publish"]
    assert [event.name for event in rows] == ["publish 0", "publish 1", "publish 2"]
    assert all(a.start_us + a.duration_us <= b.start_us + 1 for a, b in zip(rows, rows[1:]))


@faults.injected(stale_group=1)
def test_a_stale_group_is_the_negative_control():
    rank = OneRank()
    for value in (5.0, 6.0):
        with torch.no_grad():
            for group in rank.groups:
                group.whole.fill_(value)
        rank.publish()
        rank.publisher.settled()
    assert [float(rank.pool.copies[index][0]) for index in range(3)] == [6.0, 5.0, 6.0]
    assert rank.versions() == [3, 3, 3]  # its flag lies
    rank.close()


@pytest.mark.parametrize("by_thread", [False, True])
def test_an_error_while_writing_is_heard_by_who_waits(by_thread, monkeypatch):
    rank = OneRank(offloaded=(lambda: [(0, torch.ones(128))]) if by_thread else None)
    monkeypatch.setattr(rank.pool, "slice_of", lambda group, rank: torch.zeros(7))  # of another size than the shard
    rank.publish()
    with pytest.raises(RuntimeError):
        rank.publisher.settled()
    if by_thread:
        with pytest.raises(RuntimeError):
            rank.pool.is_published(rank.groups[2], 2)
        assert rank.versions()[2] < 0  # the other ranks hear of it, too
    rank.close()


def test_the_watch_hears_of_a_rank_that_will_never_publish_whoever_writes_the_copy():
    for offloaded in (None, lambda: [(0, torch.ones(128))]):
        rank = OneRank(offloaded=offloaded)
        rank.pool.blocks[0].pids = [(1 << 22) + 1]  # more than any process's number
        with pytest.raises(PeerLost, match="ended while others waited for it to publish group 0"):
            rank.pool.check_peers(2)
        rank.close()
