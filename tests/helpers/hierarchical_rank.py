"""Program of one of four ranks on two nodes: gathers in two legs, many in flight, beside flat ones."""

import sys

import torch
import torch.distributed as dist

from megatron_ext.cpubench import gloo
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.hierarchical import HierarchicalGather
from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.workload.parallel import Parallel

gloo.run_collectives_in_order()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
parallel = Parallel(
    pipeline_model_parallel_size=1, data_parallel_size=size, num_microbatches=1, order="no_pipeline", gpus_per_node=2
)
gather = HierarchicalGather(make_node_groups(parallel), device_of(torch.empty(0)))
cases = []
for number in range(12):
    dtype = (torch.float32, torch.bfloat16)[number % 2]
    shard = torch.rand(64 * (number + 1), generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)
    whole = torch.full((shard.numel() * size,), -1.0, dtype=dtype)
    # With zero stage 1 the shard is a part of the whole.
    own = whole.narrow(0, rank * shard.numel(), shard.numel()).copy_(shard) if number % 3 else shard
    flat = torch.empty_like(whole)
    cases.append((whole, flat, gather.issue(whole, own), dist.all_gather_into_tensor(flat, shard, async_op=True)))
for whole, flat, two_legs, one in cases:
    two_legs.wait()
    one.wait()
    if not torch.equal(whole, flat):
        sys.exit(f"rank {rank}: {whole.numel()} elements of {whole.dtype} differ")
gather.close()
dist.destroy_process_group()
