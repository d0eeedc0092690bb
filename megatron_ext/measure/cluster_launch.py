"""Measure as one of the ranks that a launcher has started: torchrun or srun on all nodes, or our own on this machine.

    torchrun --nnodes 2 --nproc-per-node 8 -m megatron_ext measure --out T.json --dp 16 ...

Every process calls :func:`run`; rank 0 has the result. If one of the processes ends for any reason, the launcher ends
the others of its node; those of other nodes wait for :data:`PATIENCE`. Not yet run on more than one machine.
"""

import atexit
import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import IO

from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.measure.options import Options
from megatron_ext.workload.launcher_ranks import ranks_on_this_node


def is_launched() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def with_nodes(options: Options) -> Options:
    """``options`` with the number of ranks per node that the launcher gives.

    Raises:
        InputError: the launcher has started a different number of ranks than the options ask for.
    """
    import msgspec

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != options.world_size:
        raise InputError(
            f"--dp, --pp and --tp ask for {options.world_size} ranks", field="WORLD_SIZE", value=world_size
        )
    return msgspec.structs.replace(options, ranks_per_node=ranks_on_this_node() or world_size).check()


def meet(use_cuda: bool, threads: int):
    """Make the default process group of the ranks that a launcher has started, as torch does by itself. Collective.

    Args:
        threads: processor threads of this rank.

    Returns:
        The store that the ranks share.
    """
    import torch

    from megatron_ext.cpubench import ordered_collectives
    from megatron_ext.runtime import backends

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(threads)
    if not use_cuda:
        ordered_collectives.install()
    return _begin(f"cpu:{backends.HOST},cuda:nccl" if use_cuda else backends.HOST, "default_pg")


PATIENCE = timedelta(minutes=15)
"""How much later than the first of the ranks the last may come: each has imported, and described the model."""

_kept = []
"""Stores are kept alive because rank 0 may serve them, and ranks use them again."""


def _begin(backend: str, name: str):
    """Make the default process group under its own name. Returns a store that the ranks share. Collective."""
    import torch.distributed as dist

    rendezvous, prefix = dist.rendezvous, dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage] - they are public
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=PATIENCE)))
        _kept.append(store)
        at = {"store": prefix(name, store), "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=PATIENCE, **at)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        why = f"not all ranks came to measure; one on another node may have been refused: {one_line(str(error), 300)}"
        raise InputError(why, field="WORLD_SIZE", value=int(os.environ["WORLD_SIZE"])) from None
    return prefix("megatron_ext", store)


def said_by_first(value):
    """Rank 0's ``value`` on all ranks that a launcher has started, before :func:`meet`; without a launcher, ``value``.
    Collective."""
    if not is_launched():
        return value
    import torch.distributed as dist

    from megatron_ext.runtime import backends
    from megatron_ext.runtime.objects import gather_objects

    _begin(backends.HOST, "first")
    found = gather_objects(value)[0]
    # Until the end: PyTorch 2.6 hangs if Python frees a group while its own thread frees a tensor.
    _kept.append(dist.group.WORLD)
    atexit.register(_kept.clear)
    dist.destroy_process_group()
    return found


def everyone_and_node(per_node: int):
    """A process group of all ranks for objects, and ``exchange(object) -> list`` over the ``per_node`` ranks of this
    node, which are neighbours by rank. Collective."""
    import torch.distributed as dist

    from megatron_ext.runtime import backends
    from megatron_ext.runtime.objects import gather_objects

    everyone = dist.new_group(backend=backends.HOST)
    firsts = range(0, dist.get_world_size(), per_node)
    nodes = [dist.new_group([*range(first, first + per_node)], backend=backends.HOST) for first in firsts]
    assert isinstance(everyone, dist.ProcessGroup)
    return everyone, partial(gather_objects, process_group=nodes[dist.get_rank() // per_node])


def run(options: Options, tell: Callable[..., None] | None = None, stream: IO[str] | None = None) -> dict | None:
    """Measure as one rank; the result on rank 0, None on the other ranks.

    Args:
        tell: rank 0 calls it with keywords: ``what`` it is doing, whether it ``measures`` already, and the results
            ``so_far``. The process then ends when its time is up. None: the process runs until it has finished.
        stream: where rank 0 writes its progress; None: standard error.
    """
    import torch.distributed as dist

    from megatron_ext.measure import rank_program
    from megatron_ext.measure.fabric import shared_fabric
    from megatron_ext.measure.progress_bar import bar

    say = tell or (lambda **message: None)
    store = meet(options.uses_cuda(), options.rank_threads)
    rank = dist.get_rank()
    everyone, exchange = everyone_and_node(options.node_size)
    fabric = shared_fabric(options, rank, exchange, store, everyone, field="LOCAL_WORLD_SIZE")
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(bar(options.seconds, stream or sys.stderr)) if rank == 0 else None

        def report(done: int, total: int, what: str) -> None:
            assert progress is not None  # only rank 0 reports
            progress(done, total, what)
            say(what=what, measures=done > 0)

        result = rank_program.run(fabric, report, lambda raw: say(so_far=raw), ends=tell is not None)
        fabric.barrier()  # no rank ends while another one still uses its connections
    return result
