"""Two blocks in a pool: dense parameters are shared by both ranks of a node, experts by nobody."""

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import Clock, RankGroup
from megatron_ext.runtime.host_pool import FAILED, HostPool, Sharers
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.publisher import Publisher, Target

DENSE, EXPERTS = (
    RankGroup(index, "chunk 0", torch.full((256,), 1.0 + index), 1 - index, 2 - index) for index in range(2)
)


@pytest.fixture
def pool():
    """Of the second of two ranks."""
    sharers = [Sharers([group], 0, 1, lambda value: [value]) for group in (DENSE, EXPERTS)]
    made = HostPool(sharers, {0, 1}, set(), HostDevice())
    assert len(made.blocks) == 2
    yield made
    made.close()


def test_each_group_is_published_in_its_own_block_in_one_order(pool):
    clock, issuer = Clock(), Issuer()
    targets = [Target(group, True, False) for group in (EXPERTS, DENSE)]
    publisher = Publisher(targets, NodeCopies(pool, None, HostDevice(), issuer, clock))
    clock.version = 2
    publisher.updated(0, True)
    publisher.settled()
    publisher.end_reads(1)
    assert pool.published(DENSE) == pool.published(EXPERTS) == [2]
    assert pool.copies[1].eq(2.0).all()
    # The shard of the second of two ranks, and nothing of the first.
    assert pool.copies[0][128:].eq(1.0).all() and pool.copies[0][:128].eq(0.0).all()
    assert [flag.load() for flag in pool.reads_done] == [1, 1]
    publisher.close()


def test_who_cannot_publish_says_so_in_all_blocks(pool):
    pool.fail(OSError("full"))
    assert pool.published(DENSE) == pool.published(EXPERTS) == [FAILED]
    for group in (DENSE, EXPERTS):
        with pytest.raises(OSError, match="full"):
            pool.is_published(group, 1)
