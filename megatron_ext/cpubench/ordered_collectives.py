"""One worker thread per gloo process group, so that its collectives run one after another.

[Note: A race in gloo process groups]
torch gives every gloo process group two threads that run collectives. When a collective has ended, its thread stores
the operation's name into a string that both threads share, without a lock, and both may free it. This damages the heap,
and the process ends by SIGSEGV or SIGABRT seconds or hours later, at some other allocation. It happens if two
collectives of one group are in flight whose names have more than 15 letters, for example Megatron's coalesced
all-gathers. ``tests/helpers/gloo_race.py`` shows it in seconds. With one thread a group's collectives run in order, as
those of NCCL's communicators do.
Source: ``ProcessGroupGloo::runLoop`` (threads) and ``opTypeToString`` (names); seen with torch 2.13.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Give every gloo process group that is made from now on one thread; may be called again."""
    upstream = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if upstream is None or getattr(upstream, "in_order", False) or not hasattr(upstream, "_Options"):
        return

    class ProcessGroupInOrder(upstream):
        """A gloo process group with one thread; other arguments are those of upstream."""

        in_order = True

        def __init__(self, store, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout, **later):
            options = upstream._Options()  # ``later``: options of newer releases of torch (2.14: enable_reconfigure)
            own = {"_timeout": timeout, "_threads": 1, "_devices": _devices(upstream)}
            for name, value in (own | later).items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupInOrder


def _devices(process_group) -> list:
    """The network interfaces that torch would choose by itself."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [process_group.create_device(interface=name) for name in names] or [process_group.create_default_device()]
