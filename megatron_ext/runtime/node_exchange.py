"""Between nodes: each byte of fresh shards crosses the network once per node.

[Note: Counterparts]
A data-parallel group that spans nodes has a host pool on each. A ring over all its ranks would
carry every shard to every rank, hence many times into a node. Instead the ranks with the same
index on their nodes are counterparts: rank i of a node gets the shards of all ranks i, and
writes them into its node's pool. The shards of the others come with their own counterparts.

[Note: Receives first]
An all-gather of two ranks over TCP leaves a slow link idle at times: over one of 0.13 Gbit/s, 3 MB took up to 1.55
times their time on the wire, where plain TCP in both directions took 1.1 times and nothing was lost. With receives
issued before sends, it is 1.02 to 1.10 times. (Presumably the message that announces a receive waits behind the data
being sent, because both use one connection.)

The exchange has process groups of its own, over host memory: it runs on the publisher's thread
while the training thread issues the collectives of forward and backward, and two threads must
not share a process group.

[Note: Through host memory]
Shards are received into their place in the node's page-locked host copy, if the group has one, so no memory is touched
twice and no thread copies. The bytes go over TCP, in as many streams per node as it has ranks.
An NCCL exchange on the device would be faster. But it would take device memory (a group's shards of all nodes), and
would take network bandwidth and multiprocessors from the gathers of the forward that runs meanwhile. It would also need
one order with these gathers over all communicators. ``publish.internode`` of the cost table holds the measured time of
this exchange, so a plan uses host copies across nodes only if they pay.

[Note: Two in flight]
With one exchange at a time, the next begins only when both directions and all counterparts of this one have ended, and
the network idles whenever one of them is late. With two in flight the network is always busy. Each pair of ranks sends
its bytes over one connection in the order of the exchanges, so the second does not slow the first down. The two
exchanges in flight have different tags.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.runtime.node_groups import NodeGroups
from megatron_ext.schedule.footprint import PUBLISHED_AT_ONCE as IN_FLIGHT


class Arriving(NamedTuple):
    """Shards in flight: ``(data-parallel rank, shard)`` of all counterparts, this rank included."""

    works: tuple
    ranks: tuple[int, ...]
    shards: tuple[torch.Tensor, ...]

    def wait(self) -> list[tuple[int, torch.Tensor]]:
        """Block until the shards of the counterparts have arrived and this rank's shard is sent. Raises RuntimeError if
        a counterpart has ended."""
        for work in self.works:
            work.wait()
        return list(zip(self.ranks, self.shards))


class NodeExchange:
    """The exchange of one rank with its counterparts.

    Args:
        groups: process groups over host memory.

    Attributes:
        counterparts: their process group, in node order.
        dp_ranks: data-parallel ranks of the counterparts, in the same order.
    """

    def __init__(self, groups: NodeGroups):
        self.counterparts, self.dp_ranks = groups.across, groups.counterparts
        self._ranks = dist.get_process_group_ranks(groups.across)
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        self._begun = 0

    def begin(self, shards: Sequence[torch.Tensor], dp_rank: int) -> Arriving:
        """Exchange shards with the counterparts. Collective over them, in the same order on all.

        Args:
            shards: tensors in host memory in the order of ``dp_ranks``. This rank's shard is sent and must not change
                until the exchange is over. The others are received into; :meth:`places` makes buffers for them.
            dp_rank: this rank.
        """
        nodes, mine, tag = len(self.dp_ranks), self.dp_ranks.index(dp_rank), self._begun % IN_FLIGHT
        self._begun += 1
        # Begin with the next node, so that not all send to one node at once.
        sources, targets = ([(mine + sign * hop) % nodes for hop in range(1, nodes)] for sign in (-1, 1))
        works = [dist.irecv(shards[node], self._ranks[node], group=self.counterparts, tag=tag) for node in sources]
        works += [dist.isend(shards[mine], self._ranks[node], group=self.counterparts, tag=tag) for node in targets]
        return Arriving(tuple(works), self.dp_ranks, tuple(shards))

    def places(self, own: torch.Tensor, dp_rank: int) -> list[torch.Tensor]:
        """The ``shards`` argument of :meth:`begin`, with buffers to receive into. They are valid until
        :data:`IN_FLIGHT` further exchanges have begun, because up to this many may be in flight."""
        others = [rank for rank in self.dp_ranks if rank != dp_rank]
        come = dict(zip(others, self.buffer(own.dtype, own.numel() * len(others)).view(len(others), -1)))
        return [(come | {dp_rank: own})[rank] for rank in self.dp_ranks]

    def buffer(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """A buffer of ``size`` elements that no exchange in flight uses."""
        buffers = self._buffers.setdefault(dtype, [torch.empty(0, dtype=dtype)] * IN_FLIGHT)
        slot = self._begun % IN_FLIGHT
        if buffers[slot].numel() < size:
            buffers[slot] = torch.empty(size, dtype=dtype)
        return buffers[slot][:size]
