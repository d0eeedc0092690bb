"""What is made before the first step for gathers through buffers."""

import torch
import torch.distributed as dist

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.node_groups import NodeGroups
from megatron_ext.runtime.routes.hierarchical_gather import HierarchicalGather
from megatron_ext.runtime.routes.shard_gather import ShardGather


def test_every_process_group_gathers_before_the_first_step(monkeypatch):
    """torch makes a communicator of NCCL at the first collective, and with it takes memory of the device."""
    gathered = []
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    record = lambda whole, shard, group: gathered.append((group, whole.numel(), shard.numel()))
    monkeypatch.setattr(dist, "all_gather_into_tensor", record)
    legs = NodeGroups("local", "across", [[0, 1], [2, 3]], 0)
    routes = [HierarchicalGather(legs, HostDevice()), ShardGather("own", HostDevice())]
    for route in routes:
        before = [*gathered]
        route.make_buffers([RankGroup(0, "chunk 0", torch.zeros(64), 0, 4)])
        assert gathered == before  # one rank may have no memory: then no rank waits for it in a collective
        route.connect()
        route.close()  # its stream has done what it was given
    # In two legs through a buffer of a whole group and half of it; in one piece without a buffer.
    assert gathered == [("local", 64, 32), ("across", 64, 32), ("own", 2, 1)]
