"""Between nodes: each byte of fresh shards crosses the network once per node.

[Note: Counterparts]
A data-parallel group that spans nodes has a host pool on each. A ring over all its ranks would
carry every shard to every rank, hence many times into a node. Instead the ranks with the same
index on their nodes are counterparts: rank i of a node gathers the shards of all ranks i, and
writes them into its node's pool. The shards of the others come with their own counterparts.

The exchange has process groups of its own, over host memory: it runs on the publisher's thread
while the training thread issues the collectives of forward and backward, and two threads must
not share a process group.
"""

import torch
import torch.distributed as dist

from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.workload.parallel import Parallel


class NodeExchange:
    """The exchange of one rank with its counterparts.

    Args:
        counterparts: process group of the ranks with this rank's index on their nodes, in node
            order; None where the data-parallel group lies on one node.
        dp_ranks: data-parallel ranks of the counterparts, in the same order.
    """

    def __init__(self, counterparts=None, dp_ranks: tuple[int, ...] = ()):
        self.counterparts, self.dp_ranks = counterparts, dp_ranks
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self.received_bytes = 0

    def shards(self, own: torch.Tensor, dp_rank: int):
        """``(data-parallel rank, shard)`` of all counterparts, this rank included.

        ``own`` is the shard of ``dp_rank`` in host memory; what comes back is valid until the
        next call. Collective over the counterparts.
        """
        if self.counterparts is None:
            return [(dp_rank, own)]
        size = own.numel() * len(self.dp_ranks)
        buffer = self._buffers.get(own.dtype)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[own.dtype] = torch.empty(size, dtype=own.dtype)
        dist.all_gather_into_tensor(buffer[:size], own, group=self.counterparts)
        self.received_bytes += (size - own.numel()) * own.element_size()
        return list(zip(self.dp_ranks, buffer[:size].view(len(self.dp_ranks), -1)))


def make_process_groups(parallel: Parallel):
    """``(local, exchange)`` of this rank: a process group of the data-parallel ranks on its node
    (None: the whole data-parallel group), and its :class:`NodeExchange`.

    Collective over all ranks of the run. Raises InputError as
    :func:`megatron_ext.workload.nodes.nodes_of_replicas`.
    """
    groups = make_node_groups(parallel)
    return (None, NodeExchange()) if groups is None else (groups.local, NodeExchange(groups.across, groups.counterparts))
