"""Program of one of four ranks on two nodes: gathers in two legs, and of shards in pieces, many in flight, beside flat
ones."""

import sys

import torch
import torch.distributed as dist

from megatron_ext.cpubench import ordered_collectives
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.node_groups import make_data_group, make_node_groups
from megatron_ext.runtime.routes.hierarchical_gather import HierarchicalGather
from megatron_ext.runtime.routes.shard_gather import ShardGather
from megatron_ext.workload import route
from megatron_ext.workload.parallel import Parallel

FP32, BF16 = torch.float32, torch.bfloat16


def nodes_of_two(ranks: int) -> Parallel:
    """Data parallel alone, two ranks a node."""
    return Parallel(
        pipeline_model_parallel_size=1,
        data_parallel_size=ranks,
        num_microbatches=1,
        order="no_pipeline",
        gpus_per_node=2,
    )


def main() -> None:
    ordered_collectives.install()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = nodes_of_two(size)
    route.PIECE_BYTES = 2048
    gather = HierarchicalGather(make_node_groups(parallel), device_of(torch.empty(0)))
    in_pieces = ShardGather(make_data_group(parallel, "gloo"), device_of(torch.empty(0)))
    routes = gather, in_pieces
    wholes = [torch.zeros(64 * (number + 1) * size, dtype=(FP32, BF16)[number % 2]) for number in range(12)]
    for one in routes:
        one.make_buffers(RankGroup(0, "chunk 0", whole, 0, size) for whole in wholes)
        one.connect()
    made, cases = [one.buffer_bytes for one in routes], []
    for number in range(12):
        dtype = (FP32, BF16)[number % 2]
        shard = torch.rand(64 * (number + 1), generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)
        whole = torch.full((shard.numel() * size,), -1.0, dtype=dtype)
        # With zero stage 1 the shard is a part of the whole.
        own = whole.narrow(0, rank * shard.numel(), shard.numel()).copy_(shard) if number % 3 else shard
        flat, again = torch.empty_like(whole), torch.full_like(whole, -1.0)
        start = rank * shard.numel()
        transfers = [gather.gather(whole, own, start), in_pieces.gather(again, shard, start)]
        cases.append((whole, again, flat, [*transfers, dist.all_gather_into_tensor(flat, shard, async_op=True)]))
    for whole, again, flat, transfers in cases:
        for transfer in transfers:
            transfer.wait()
        if not torch.equal(whole, flat) or not torch.equal(again, flat):
            sys.exit(f"rank {rank}: {whole.numel()} elements of {whole.dtype} differ")
    sizes = [whole.numel() * whole.element_size() for whole, *_ in cases]
    assert {route.shard_pieces(each, size) for each in sizes} == {1, 2, 3, 4, 5}, sizes
    assert made == [one.buffer_bytes for one in routes] and made[1] > 0, "a buffer is made as its group is gathered"
    gather.close()
    in_pieces.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1  # what they gathered by is gone with them
    late = HierarchicalGather(make_node_groups(parallel), device_of(torch.empty(0)))
    dist.destroy_process_group()
    late.close()  # of a run that the script ends behind its process groups


if __name__ == "__main__":
    main()
