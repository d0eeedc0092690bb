"""Routes: how a whole group reaches the device. One file a route.

Issuing never blocks. Waiting returns when the bytes are there for the compute that follows: on CUDA the compute stream
waits and not the host, but for what a thread has to bring first (a drive, another node, the host's optimizer).

[Note: One order over all communicators]
NCCL wants the collectives of all communicators in one order on all ranks that share them. A rank has several: the data-
parallel one of the ``gpu`` route and of gradients, those of the hierarchical all-gather (two), of ``cpu_shard``, the
same again for experts, which other ranks share, and Megatron's for tensor, expert and pipeline parallelism. The
training thread issues every one of them, when the program says so. All data-parallel ranks run the same program,
compiled from one file (they compare its sha256) for their pipeline rank, and Megatron's steps, between which it issues,
are the same on them. So the order is the same; nothing in it depends on what has arrived. The debug mode (debug.py)
counts all of them and compares the order after every iteration.
On a machine without a GPU threads issue those that go by a stream of their own; their communicators are used by nobody
else, and there is no order between process groups.
"""

from typing import Protocol

from megatron_ext.runtime.group import Group
from megatron_ext.runtime.worker import Waitable


class Route(Protocol):
    """Brings groups onto the device, see the note above."""

    def issue(self, group: Group) -> Waitable: ...
