"""Data-parallel groups that span nodes: who exchanges with whom, and how much crosses the network."""

import torch

from megatron_ext.runtime import node_exchange
from megatron_ext.runtime.node_exchange import NodeExchange


def test_every_shard_enters_a_node_once(monkeypatch):
    """Three nodes of two ranks: together the ranks of a node receive exactly the bytes that the node lacks."""
    shards = {rank: torch.full((64,), float(rank)) for rank in range(6)}
    received, total = {}, 0
    for index in (0, 1):
        dp_ranks = (index, 2 + index, 4 + index)

        def all_gather(output, own, group):
            output.view(3, -1).copy_(torch.stack([shards[rank] for rank in group]))

        monkeypatch.setattr(node_exchange.dist, "all_gather_into_tensor", all_gather)
        exchange = NodeExchange(dp_ranks, dp_ranks)
        for dp_rank, shard in exchange.shards(shards[2 + index], 2 + index):
            assert dp_rank not in received and torch.equal(shard, shards[dp_rank])
            received[dp_rank] = shard.clone()
        total += exchange.received_bytes
    assert sorted(received) == list(range(6))
    assert total == 4 * 64 * 4  # four shards lie on the other nodes


def test_one_node_exchanges_nothing():
    exchange, own = NodeExchange(), torch.zeros(8)
    assert exchange.shards(own, 3) == [(3, own)] and exchange.received_bytes == 0
