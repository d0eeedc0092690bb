"""The publisher writes fresh shards: in order, behind the reads of the last iteration, with a flag behind each."""

import time

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.node_exchange import Arriving, NodeExchange
from megatron_ext.runtime.publisher import Publisher, Target


class OneRank:
    """Rank 0 of a node with two; the other's flags are set by the test."""

    def __init__(self, faults=Faults(), offloaded=None, nodes=None):  # noqa: B008  a named tuple
        self.groups = [Group(index, "chunk 0", torch.full((256,), 1.0 + index), 0, 2) for index in range(3)]
        self.pool = HostPool(self.groups, {0, 1, 2}, 0, 1, lambda value: [value])
        self.clock = Clock()
        targets = [Target(group, True, False, offloaded) for group in self.groups]
        nodes = nodes or NodeExchange()
        self.publisher = Publisher(targets, self.pool, None, nodes, 0, HostDevice(), self.clock, faults)

    def publish(self, iterations: int = 0) -> None:
        self.clock.version += 1
        self.publisher.publish(iterations)

    def versions(self) -> list[int]:
        return [int(self.pool.published(group)[0]) for group in self.groups]

    def close(self) -> None:
        self.publisher.close()
        self.pool.close()


class OtherNode(NodeExchange):
    """An exchange with one counterpart, all of whose elements are 9."""

    crosses_nodes = True

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
    rank.publisher.wait()
    assert rank.versions() == [2, 2, 2]
    for group in rank.groups:
        copy = rank.pool.copies[group.index]
        assert torch.equal(copy[:128], group.shard) and not copy[128:].any()  # the other rank's half


def test_what_comes_from_another_node_is_received_in_its_place_in_the_host_copy():
    rank = OneRank(nodes=OtherNode(dp_ranks=(0, 1)))
    rank.publish()
    rank.publisher.wait()
    for group in rank.groups:
        copy = rank.pool.copies[group.index]
        assert torch.equal(copy[:128], group.shard) and (copy[128:] == 9).all()
    rank.close()


def test_what_an_iteration_reads_is_overwritten_only_when_all_have_ended_it(rank):
    rank.publish()
    rank.publisher.wait()
    with torch.no_grad():
        rank.groups[0].whole.fill_(50.0)
    rank.publish(iterations=1)  # this rank has ended one, its flag does not say so yet
    time.sleep(0.05)
    assert rank.versions() == [2, 2, 2] and rank.pool.copies[0][0] == 1.0
    rank.pool.set_reads_done(1)
    rank.publisher.wait()
    assert rank.versions() == [3, 3, 3] and rank.pool.copies[0][0] == 50.0


def test_shards_that_the_optimizer_holds_on_the_host_are_rounded_from_there():
    pieces = [(0, torch.full((100,), 0.5)), (100, torch.full((20,), 0.25))]
    rank = OneRank(offloaded=lambda: pieces)
    rank.publish()
    rank.publisher.wait()
    copy = rank.pool.copies[1]
    assert (copy[:100] == 0.5).all() and (copy[100:120] == 0.25).all()
    rank.close()


def test_a_stale_group_is_the_negative_control():
    rank = OneRank(Faults(stale_group=1))
    for value in (5.0, 6.0):
        with torch.no_grad():
            for group in rank.groups:
                group.whole.fill_(value)
        rank.publish()
        rank.publisher.wait()
    assert [float(rank.pool.copies[index][0]) for index in range(3)] == [6.0, 5.0, 6.0]
    assert rank.versions() == [3, 3, 3]  # its flag lies
    rank.close()


def test_an_error_while_writing_is_heard_by_who_waits(rank):
    rank.groups[1].shard = rank.groups[1].shard[:7]  # of another size than its part of the copy
    rank.pool.copies[1] = rank.pool.copies[1][:3]
    rank.publish()
    with pytest.raises(RuntimeError):
        rank.publisher.wait()
    with pytest.raises(RuntimeError):
        rank.pool.wait_published(rank.groups[1], 2)
