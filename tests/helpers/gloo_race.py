"""Program of one rank: coalesced all-gathers, many in flight, for some seconds.

Arguments: "in-order" or "as-shipped", and the seconds."""

import os
import sys
import time

import torch
import torch.distributed as dist

from megatron_ext.cpubench import ordered_collectives

if sys.argv[1] == "in-order":
    ordered_collectives.install()
dist.init_process_group("gloo")
shards = [torch.full((8,), float(dist.get_rank() + 1)) for _ in range(16)]
wholes = [torch.empty(8 * dist.get_world_size()) for _ in shards]
end, rounds = time.monotonic() + float(sys.argv[2]), torch.zeros(1)
while rounds.item() >= 0:
    handles = []
    for shard, whole in zip(shards, wholes):
        with dist._coalescing_manager(async_ops=True) as handle:
            dist.all_gather_into_tensor(whole, shard)
        handles.append(handle)
    for handle in handles:
        handle.wait()
    # All ranks end with the same round.
    rounds[0] = rounds[0] + 1 if time.monotonic() < end else -1
    dist.broadcast(rounds, src=0)
assert all(whole.unique().tolist() == [1.0, 2.0] for whole in wholes)
sys.stdout.flush()
os._exit(0)
