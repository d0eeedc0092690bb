"""Route ``gpu``: all-gather of the ranks' shards."""

import torch
import torch.distributed as dist

from megatron_ext.runtime.group import RankGroup


class AllGather:
    """All-gather over ``process_group``, in place. A shard that rests in host memory is first copied to its place in
    the whole group."""

    def __init__(self, process_group):
        self.process_group = process_group

    def issue(self, group: RankGroup):
        shard = group.shard
        if group.on_host:
            shard = group.whole.narrow(0, group.shard_start, shard.numel())
            with torch.no_grad():
                shard.copy_(group.shard, non_blocking=True)
        work = dist.all_gather_into_tensor(group.whole, shard, group=self.process_group, async_op=True)
        assert work is not None  # async_op
        return work
