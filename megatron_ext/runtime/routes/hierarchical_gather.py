"""All-gather in two legs, for data-parallel groups that span nodes.

[Note: Two legs]
A flat ring over N nodes of L ranks carries all but 1/(N*L) of a group over every link, including
those between nodes. With two legs, counterparts (ranks with the same index on their nodes) first
gather each other's shards, so that every byte enters a node once: all but 1/N of the group. Then
the ranks of a node gather from each other what their counterparts sent. The result is in the
order of (index, node) and is copied into the bucket's order.
Source: BlueConnect (Cho et al., MLSys 2019).
"""

import torch
import torch.distributed as dist

from megatron_ext.runtime.node_groups import NodeGroups
from megatron_ext.runtime.recorder import NOTHING
from megatron_ext.runtime.routes.buffered_gather import BufferedGather


class HierarchicalGather(BufferedGather):
    """Gathers over both legs.

    Args:
        groups: process groups of the device's backend.
    """

    def __init__(self, groups: NodeGroups, device, recorder=NOTHING):
        super().__init__("hierarchical", (groups.local, groups.across), device, recorder)
        self.groups = groups

    def _elements(self, whole: torch.Tensor, numel: int) -> int:
        return len(self.groups.nodes) * numel + whole.numel()

    def _gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        numel, number, per_node = shard.numel(), len(self.groups.nodes), len(self.groups.nodes[0])
        buffer = self._buffer(whole, numel)
        mine, all_of_node = buffer[: number * numel], buffer[number * numel :][: whole.numel()]
        dist.all_gather_into_tensor(mine, shard, group=self.groups.across)
        dist.all_gather_into_tensor(all_of_node, mine, group=self.groups.local)
        # Data-parallel ranks of a node are consecutive, see nodes_of_replicas.
        whole.view(number, per_node, numel).copy_(all_of_node.view(per_node, number, numel).transpose(0, 1))
