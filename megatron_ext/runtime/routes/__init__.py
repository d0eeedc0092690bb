"""Routes: how a whole group reaches the device. One file per route.

Issuing never blocks. A wait returns when the bytes are there for the compute that follows. On CUDA the compute stream
waits, not the host, unless a thread has to bring something first (a drive, another node, the host's optimizer).

[Note: One order over all communicators]
NCCL requires the collectives of all communicators in one order on all ranks that share them. A rank has several: the
data-parallel communicator of the ``gpu`` route and of gradients, two of the hierarchical all-gather, one of
``cpu_shard``, the same again for experts, which other ranks share, and Megatron's for tensor, expert and pipeline
parallelism. The training thread issues all of these collectives at the places that the program gives. All data-parallel
ranks run the same program, compiled from one file (they compare its sha256) for their pipeline rank. Megatron's steps,
between which it issues, are the same on them as well. So the order is the same, and does not depend on what has
arrived. The debug mode (debug.py) counts all collectives and compares the order after every iteration.
On a machine without a GPU, threads issue the collectives that use a stream of their own. No other thread uses their
communicators, and no order between process groups is needed.
"""

from typing import Protocol

from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.worker import Waitable


class Route(Protocol):
    """Brings groups onto the device, see the note above."""

    def issue(self, group: RankGroup) -> Waitable: ...
