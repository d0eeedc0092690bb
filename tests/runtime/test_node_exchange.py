"""Data-parallel groups that span nodes: who exchanges with whom, and how much crosses the network."""

import torch

from megatron_ext.runtime import node_exchange
from megatron_ext.runtime.node_exchange import IN_FLIGHT, NodeExchange


def test_every_shard_enters_a_node_once(monkeypatch):
    """Three nodes of two ranks: together the ranks of a node receive exactly the bytes that the node lacks."""
    shards = {rank: torch.full((64,), float(rank)) for rank in range(6)}
    received, total = {}, 0
    for index in (0, 1):
        dp_ranks = (index, 2 + index, 4 + index)

        def all_gather(output, own, group, async_op):
            output.view(3, -1).copy_(torch.stack([shards[rank] for rank in group]))

        monkeypatch.setattr(node_exchange.dist, "all_gather_into_tensor", all_gather)
        exchange = NodeExchange(dp_ranks, dp_ranks)
        for dp_rank, shard in exchange.begin(shards[2 + index], 2 + index).wait():
            assert dp_rank not in received and torch.equal(shard, shards[dp_rank])
            received[dp_rank] = shard.clone()
        total += exchange.received_bytes
    assert sorted(received) == list(range(6))
    assert total == 4 * 64 * 4  # four shards lie on the other nodes


def test_one_node_exchanges_nothing():
    exchange, own = NodeExchange(), torch.zeros(8)
    assert exchange.begin(own, 3).wait() == [(3, own)] and exchange.received_bytes == 0


def test_what_came_stays_while_the_next_is_on_its_way(monkeypatch):
    def all_gather(output, own, group, async_op):
        output.copy_(torch.cat([own, own]))

    monkeypatch.setattr(node_exchange.dist, "all_gather_into_tensor", all_gather)
    exchange = NodeExchange((0, 1), (0, 1))
    begun = [exchange.begin(torch.full((4,), float(number)), 0) for number in range(IN_FLIGHT)]
    for number, arriving in enumerate(begun):
        assert [(rank, shard.tolist()) for rank, shard in arriving.wait()] == [(0, [number] * 4), (1, [number] * 4)]
