"""All-gather in two legs, for data-parallel groups that span nodes.

[Note: Two legs]
A flat ring over N nodes of L ranks carries all but 1/(N*L) of a group over every link, those
between nodes as well. In two legs, counterparts (ranks with the same index on their nodes) gather
each other's shards first, so that every byte enters a node once, all but 1/N of the group; then
the ranks of a node gather from each other what their counterparts sent. What arrives is in the
order of (index, node) and is copied into the bucket's order.
Source: BlueConnect (Cho et al., MLSys 2019).

Its process groups are its own. On CPU both legs run on a thread, one gather after another; on
CUDA the training thread issues them, as NCCL wants one order over all communicators, on a stream
of their own.
"""

from time import perf_counter_ns

import torch
import torch.distributed as dist

from megatron_ext.runtime.group import Group
from megatron_ext.runtime.node_groups import NodeGroups
from megatron_ext.runtime.worker import Transfer, Worker


class HierarchicalGather:
    """Gathers over both legs; one instance a rank.

    Args:
        groups: process groups of the device's backend, used by nobody else.
        device: see :mod:`megatron_ext.runtime.device`.
    """

    def __init__(self, groups: NodeGroups, device):
        self.groups, self.device = groups, device
        self.stream = device.copy_stream()
        self.worker = Worker("hierarchical-gather") if self.stream is None else None
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def issue(self, whole: torch.Tensor, shard: torch.Tensor, done=None) -> Transfer:
        """Fill ``whole`` (1D) from all ranks' shards; returns at once. ``done(start_ns, end_ns)`` is
        called when it is full, on CPU."""
        after = self.device.mark()
        if self.worker is None:
            transfer = Transfer()
            transfer.after = self.device.on_stream(lambda: self._gather(whole, shard), self.stream, after)
            transfer.finish()
            return transfer

        def gather(transfer: Transfer) -> None:
            start = perf_counter_ns()
            self._gather(whole, shard)
            if done is not None:
                done(start, perf_counter_ns())

        return self.worker.submit(gather)

    def _gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        nodes, numel = self.groups.nodes, shard.numel()
        number, per_node = len(nodes), len(nodes[0])
        with torch.no_grad():
            buffer = self._buffer(whole.dtype, number * numel + whole.numel(), whole.device)
            mine, all_of_node = buffer[: number * numel], buffer[number * numel :][: whole.numel()]
            dist.all_gather_into_tensor(mine, shard, group=self.groups.across)
            dist.all_gather_into_tensor(all_of_node, mine, group=self.groups.local)
            # Data-parallel ranks of a node are neighbours, see nodes_of_replicas.
            whole.view(number, per_node, numel).copy_(all_of_node.view(per_node, number, numel).transpose(0, 1))

    def _buffer(self, dtype: torch.dtype, numel: int, device: torch.device) -> torch.Tensor:
        """Kept from gather to gather, which run one after another."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=device)
        return buffer

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that groups are gathered in."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


class HierarchicalRoute:
    """The gpu route of groups whose ``algorithm`` is ``hierarchical``."""

    name = "gpu"

    def __init__(self, gather: HierarchicalGather, recorder=None):
        self.gather, self.recorder = gather, recorder

    def issue(self, group: Group) -> Transfer:
        recorder = self.recorder
        if recorder is None:
            return self.gather.issue(group.whole, group.shard)
        name = f"unshard {group.index}"
        return self.gather.issue(group.whole, group.shard, lambda start, end: recorder.add("gpu", name, start, end))

    @property
    def buffer_bytes(self) -> int:
        return self.gather.buffer_bytes

    def close(self) -> None:
        self.gather.close()
