"""Data-parallel groups that span nodes: who exchanges with whom, and how much crosses the network."""

import sys

import torch
from places import HELPERS
from training import run

from megatron_ext.runtime import node_exchange
from megatron_ext.runtime.node_exchange import NodeExchange
from megatron_ext.runtime.node_groups import NodeGroups


def test_every_shard_enters_a_node_once_and_stays_while_the_next_is_on_its_way():
    """Three nodes of two ranks, real processes: each receives the bytes of its counterparts and no others."""
    program = HELPERS / "node_exchange_rank.py"
    result = run(
        [sys.executable, "-m", "megatron_ext.launch.launcher", "--fork", "--nproc-per-node", "6", str(program)]
    )
    assert result.returncode == 0, result.stderr


def test_receives_are_issued_before_sends(monkeypatch):
    """And not all to the same node first; see [Note: Receives first]."""
    issued = []
    monkeypatch.setattr(node_exchange.dist, "get_process_group_ranks", lambda group: [4, 5, 6])
    monkeypatch.setattr(
        node_exchange.dist, "irecv", lambda tensor, rank, group, tag: issued.append(("receive", rank, tag))
    )
    monkeypatch.setattr(
        node_exchange.dist, "isend", lambda tensor, rank, group, tag: issued.append(("send", rank, tag))
    )
    exchange = NodeExchange(NodeGroups("local", "counterparts", [[0], [1], [2]], 0))
    for _ in range(3):
        exchange.begin(exchange.places(torch.zeros(4), 1), 1)
    assert issued == [
        (what, rank, tag)
        for tag in (0, 1, 0)
        for what, rank in (("receive", 4), ("receive", 6), ("send", 6), ("send", 4))
    ]
