"""Measure as one of the ranks that a launcher has started: torchrun or srun on all nodes, or our own on this machine.

    torchrun --nnodes 2 --nproc-per-node 8 -m megatron_ext measure --out T.json --dp 16 ...

Every process calls :func:`run`; rank 0 has the result. If one of the processes ends for any reason, the launcher ends
the others of its node. Not yet run on more than one machine.

[Note: Ranks of other nodes]
No launcher ends them. A rank may fail at any place (a file that its node lacks, a drive that is full), and the others
may be in any collective then. So each rank has a thread that waits until the store holds a failure, or until the
process that serves the store is gone, and then ends the process (:func:`ends_all`). It waits without the interpreter's
lock, so it takes no time from what is measured. What all ranks alike can tell from their own environment and command
line is checked before they connect: if ranks are missing, nobody waits for them.
If a rank is killed that does not serve the store, the others notice it in their next collective over TCP.
"""

import contextlib
import json
import os
import resource
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import IO, Any

from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.measure.options import Options
from megatron_ext.workload.launcher_ranks import ranks_on_this_node


def is_launched() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def with_nodes(options: Options) -> Options:
    """``options`` with the number of ranks per node that the launcher gives, if one has started this process.

    Raises:
        InputError: an option cannot be measured, or there is another number of ranks than the options ask for.
    """
    import msgspec

    if not is_launched():
        return options.check()
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != options.world_size:
        why = f"--dp, --pp and --tp ask for {options.world_size} ranks"
        raise InputError(why, field="WORLD_SIZE", value=world_size)
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

    # Groups over host memory connect each rank with every other one. The usual limit of 1,024 open files would end a
    # measurement on several hundred ranks, which train within it.
    with contextlib.suppress(ValueError, OSError):  # more than the kernel allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most := resource.getrlimit(resource.RLIMIT_NOFILE)[1], most))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(threads)
    if not use_cuda:
        ordered_collectives.install()
    return _connect(f"cpu:{backends.HOST},cuda:nccl" if use_cuda else backends.HOST)[0]


PATIENCE = timedelta(minutes=15)
"""How much later than the first of the ranks the last may come: each has imported, and described the model."""

_kept = []
"""Stores are kept alive because rank 0 may serve them, and ranks use them again."""


def _connect(backend: str | None = None):
    """A new connection to the store that the ranks share, and this rank, when all ranks have come. With ``backend``,
    they become the default process group. Collective."""
    import torch.distributed as dist

    rendezvous, prefix = dist.rendezvous, dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage] - they are public
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=PATIENCE)))
        _kept.append(store)
        store.add(f"ranks of {backend}", 1)
        if store.add(all_came := f"connection {len(_kept)}", 1) == world_size:
            store.set(f"{all_came} of all", "1")
        store.wait([f"{all_came} of all"])
        if backend is not None:
            if (alike := store.add(f"ranks of {backend}", 0)) < world_size:
                sees = f"torch sees {'a' if 'nccl' in backend else 'no'} CUDA device on {alike} of {world_size} ranks"
                raise InputError(f"{sees} only, among them rank {rank}", field="--device")
            at = {"store": prefix("default_pg", store), "rank": rank, "world_size": world_size}
            dist.init_process_group(backend, timeout=PATIENCE, **at)
    except InputError:
        raise
    except (ValueError, dist.DistStoreError, dist.DistNetworkError) as error:  # ValueError: an environment variable
        why = f"the ranks cannot meet; one on another node may have ended: {one_line(str(error), 300)}"
        raise InputError(why, field="WORLD_SIZE", value=int(os.environ["WORLD_SIZE"])) from None
    return prefix("megatron_ext", store), rank


def said_by_first(value: str | None) -> str | None:
    """Rank 0's ``value`` on all ranks that a launcher has started; without a launcher, ``value``. Collective."""
    if not is_launched():
        return value
    store, rank = _connect()
    if rank == 0:
        store.set("said", json.dumps(value))
    return json.loads(store.get("said"))


@contextlib.contextmanager
def ends_all():
    """If the body of this context fails on one of the ranks that a launcher has started, the processes of all of them
    end with one line that names its node. See [Note: Ranks of other nodes]. Collective."""
    if not is_launched():
        yield
        return
    (heard, rank), (told, _) = _connect(), _connect()  # a connection serves one call at a time
    heard.set_timeout(timedelta(days=7))
    over, aloud = threading.Event(), os.dup(2)  # doctor sends what its ranks print elsewhere

    def listen() -> None:
        try:
            end = heard.get("end").decode()
        except RuntimeError:
            end = "" if over.is_set() else "1rank 0, or the launcher that serves the ranks' store, has ended"
        if end:
            os.write(aloud, f"megatron-ext: {end[1:]}\n".encode())
            time.sleep(1)  # this process, or its launcher, may serve the store that others are still to read
            os._exit(int(end[0]))

    (listener := threading.Thread(target=listen, name="megatron_ext-end", daemon=True)).start()
    try:
        yield
    except Exception as error:
        refused = isinstance(error, InputError)
        end = f"{2 if refused else 1}on {socket.gethostname()}: {error if refused else one_line(repr(error))}"
        with contextlib.suppress(RuntimeError):  # the store is gone
            if told.compare_set("end", "", end).decode() == end and not refused:
                traceback.print_exc()
        listener.join()
        raise
    over.set()
    if rank == 0:
        told.set("end", "")
    listener.join()


def everyone_and_node(per_node: int):
    """A process group of all ranks for objects, and ``exchange(object) -> list`` over the ``per_node`` ranks of this
    node, which are neighbours by rank. Collective."""
    import torch.distributed as dist

    from megatron_ext.runtime import backends
    from megatron_ext.runtime.objects import gather_objects

    everyone: Any = dist.new_group(backend=backends.HOST)
    firsts = range(0, dist.get_world_size(), per_node)
    nodes = [dist.new_group([*range(first, first + per_node)], backend=backends.HOST) for first in firsts]
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
