"""Two pools as one: dense parameters are shared by both ranks of a node, experts by nobody."""

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import FAILED, HostPool
from megatron_ext.runtime.host_pools import HostPools
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_exchange import NodeExchange
from megatron_ext.runtime.publisher import Publisher, Target

DENSE, EXPERTS = (Group(index, "chunk 0", torch.full((256,), 1.0 + index), 1 - index, 2 - index) for index in range(2))


@pytest.fixture
def pools():
    """Of the second of two ranks."""
    made = [
        HostPool([DENSE], {0}, set(), 0, 1, lambda value: [value], HostDevice()),
        HostPool([EXPERTS], {1}, set(), 0, 1, lambda value: [value], HostDevice()),
    ]
    yield HostPools(made)
    for pool in made:
        pool.close()


def test_each_group_is_published_in_its_own_pool_in_one_order(pools):
    clock, issuer = Clock(), Issuer()
    targets = [Target(group, True, False, nodes=NodeExchange()) for group in (EXPERTS, DENSE)]
    publisher = Publisher(targets, pools, None, HostDevice(), issuer, clock)
    clock.version = 2
    publisher.publish(0)
    publisher.wait()
    publisher.end_reads(1)
    assert pools.published(DENSE) == pools.published(EXPERTS) == [2]
    assert pools.copy_of(EXPERTS).eq(2.0).all()
    # The shard of the second of two ranks, and nothing of the first.
    assert pools.copy_of(DENSE)[128:].eq(1.0).all() and pools.copy_of(DENSE)[:128].eq(0.0).all()
    assert [flag.load() for flag in pools.reads_done] == [1, 1]
    publisher.close()


def test_who_cannot_publish_says_so_in_all_pools(pools):
    pools.fail(OSError("full"))
    assert pools.published(DENSE) == pools.published(EXPERTS) == [FAILED]
    for group in (DENSE, EXPERTS):
        with pytest.raises(OSError, match="full"):
            pools.is_published(group, 1)
