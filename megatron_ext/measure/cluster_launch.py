"""Measure under torchrun or srun: the ranks of all nodes are there already.

    torchrun --nnodes 2 --nproc-per-node 8 -m megatron_ext measure --out T.json --dp 16 ...

Every process calls :func:`run`; rank 0 has the result. Whatever ends one of them, the launcher
ends the others. Not yet run on more than one machine, nor on a GPU.
"""

from __future__ import annotations

import os
import warnings

from megatron_ext.formats.errors import InputError
from megatron_ext.measure.options import Options
from megatron_ext.workload.launcher_ranks import ranks_on_this_node


def is_launched() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def with_nodes(options: Options) -> Options:
    """``options`` with the ranks of a node that the launcher says.

    Raises:
        InputError: the launcher has started another number of ranks than the options ask for.
    """
    import msgspec

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != options.world_size:
        raise InputError(
            f"{options.world_size} ranks are asked for by --dp x --pp", field="WORLD_SIZE", value=world_size
        )
    return msgspec.structs.replace(options, ranks_per_node=ranks_on_this_node() or world_size).check()


def meet(backend: str):
    """Make the default process group of the ranks that a launcher has started, as torch does by itself. Collective.

    Returns:
        A store by which they meet.
    """
    import torch.distributed as dist

    rendezvous, prefix = dist.rendezvous, dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage] - they are public
    store, rank, world_size = next(iter(rendezvous("env://")))
    of_torch, ours = (prefix(name, store) for name in ("default_pg", "megatron_ext"))
    dist.init_process_group(backend, store=of_torch, rank=rank, world_size=world_size)
    return ours


def run(options: Options, progress) -> dict | None:
    """Measure as one rank; the result on rank 0, None on the other ranks."""
    import torch
    import torch.distributed as dist

    from megatron_ext.cpubench import gloo
    from megatron_ext.measure import rank_program
    from megatron_ext.measure.board import StoreBoard
    from megatron_ext.measure.fabric import Fabric, shared_bytes
    from megatron_ext.runtime import shared_block

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    use_cuda = options.uses_cuda()
    torch.set_num_threads(options.rank_threads)
    gloo.run_collectives_in_order()
    store = meet("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    rank, per_node = dist.get_rank(), options.ranks_per_node
    assert per_node is not None  # set by whoever read the launcher's environment
    everyone = dist.new_group(backend="gloo")
    nodes = [
        dist.new_group(list(range(first, first + per_node)), backend="gloo")
        for first in range(0, options.world_size, per_node)
    ]

    def exchange(value) -> list:
        values: list = [None] * per_node
        dist.all_gather_object(values, value, group=nodes[rank // per_node])
        return values

    block = shared_block.share(shared_bytes(options), rank % per_node, exchange, field="LOCAL_WORLD_SIZE")
    board = StoreBoard(store, rank, everyone) if len(nodes) > 1 else None
    fabric = Fabric(options, rank, block, board)
    result = rank_program.run(fabric, progress if rank == 0 else lambda done, total, what: None)
    fabric.board.barrier()
    return result
