"""Program of one of six ranks on three nodes: exchanges shards with its counterparts, two exchanges on their way."""

import sys
from collections import deque

import torch
import torch.distributed as dist
from hierarchical_rank import nodes_of_two

from megatron_ext.runtime.node_exchange import IN_FLIGHT, NodeExchange
from megatron_ext.runtime.node_groups import make_node_groups

NUMBERS = 9


def shard_of(dp_rank: int, number: int) -> torch.Tensor:
    dtype = (torch.float32, torch.bfloat16)[number % 3 == 2]
    return torch.rand(1 << (10 + number % 4 * 3), generator=torch.Generator().manual_seed(100 * number + dp_rank)).to(
        dtype
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = nodes_of_two(size)
    exchange = NodeExchange(make_node_groups(parallel))
    counterparts, begun = [rank % 2 + 2 * node for node in range(3)], deque()

    def end() -> None:
        number, arriving = begun.popleft()
        found = arriving.wait()
        if [dp_rank for dp_rank, _ in found] != counterparts:
            sys.exit(f"rank {rank}: shards of {found}")
        for dp_rank, shard in found:
            if not torch.equal(shard, shard_of(dp_rank, number)):
                sys.exit(f"rank {rank}: exchange {number}: what came of {dp_rank} is not what it sent")

    for number in range(NUMBERS):
        if len(begun) == IN_FLIGHT:
            end()
        own = shard_of(rank, number)
        begun.append((number, exchange.begin(exchange.places(own, rank), rank)))
    while begun:
        end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
