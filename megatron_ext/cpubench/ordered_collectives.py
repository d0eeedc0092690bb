"""One worker thread a gloo process group, so that its collectives run one after another.

[Note: A race in gloo process groups]
torch gives every gloo process group two threads that run collectives. When one has ended, its
thread stores the operation's name into a string that both share, without a lock, and both may
free it: the heap is damaged, and the process ends by SIGSEGV or SIGABRT seconds or hours later,
in whatever allocates next. It takes two collectives of one group in flight with names of more
than 15 letters: Megatron's coalesced all-gathers, for one. ``tests/helpers/gloo_race.py`` shows it in seconds. One
thread runs a group's collectives in order, as NCCL's communicators do.
Source: ``ProcessGroupGloo::runLoop`` (threads) and ``opTypeToString`` (names); seen with torch 2.13.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Let every gloo process group made from now on have one thread; may be called again."""
    upstream = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if upstream is None or getattr(upstream, "in_order", False) or not hasattr(upstream, "_Options"):
        return

    class ProcessGroupInOrder(upstream):
        """A gloo process group with one thread; other arguments as upstream takes them."""

        in_order = True

        def __init__(self, store, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout, **later):
            options = upstream._Options()  # ``later``: what newer releases of torch give (2.14: enable_reconfigure)
            own = {"_timeout": timeout, "_threads": 1, "_devices": _devices(upstream)}
            for name, value in (own | later).items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupInOrder


def _devices(process_group) -> list:
    """The network interfaces that torch would take by itself."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [process_group.create_device(interface=name) for name in names] or [process_group.create_default_device()]
