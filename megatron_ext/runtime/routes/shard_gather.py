"""Route ``cpu_shard``: this rank's shard from host memory, then an all-gather.

Each rank copies 1/DP of the group over its own PCIe link, and the all-gather does the rest. The shard is the one that
rests in host memory, so nothing is published for this route.
Source: bandwidth-centric partitioning of ZeRO-Infinity (Rajbhandari et al., SC 2021).

Large groups are split into pieces (:func:`megatron_ext.workload.route.shard_pieces`): one piece is gathered while the
next is copied, and the next group is copied during this one's last all-gather. The route has its own process group.
Groups that one rank holds whole are only copied: their shard is the copy in host memory.
"""

import itertools
from functools import partial

import torch
import torch.distributed as dist

from megatron_ext.runtime.recorder import NOTHING, log_of
from megatron_ext.runtime.routes.buffered_gather import BufferedGather
from megatron_ext.workload.route import shard_pieces


class ShardGather(BufferedGather):
    """Copies shards into whole groups on one stream and gathers them on another.

    Args:
        process_group: None if shards are whole groups.
    """

    def __init__(self, process_group, device, recorder=NOTHING):
        super().__init__("cpu-shard-gathers", (process_group,) if process_group else (), device, recorder)
        self.process_group = process_group
        self._copies, self._copied = device.stream("cpu-shard-copies"), device.event()
        self._copies.log = log_of(recorder, "gather", "to_device", "cpu")

    def _queue(self, whole: torch.Tensor, shard: torch.Tensor, start: int, taken, name: str) -> None:
        pieces = shard_pieces(whole.nbytes, whole.numel() // shard.numel())
        ends = [shard.numel() * number // pieces for number in range(pieces + 1)]
        self._copies.wait(taken)
        for begin, end in itertools.pairwise(ends):
            self._copies.copy(whole[start + begin : start + end], shard[begin:end], name)
            self.stream.wait(self._copies.record(self._copied))
            if self.process_group is not None:
                self.stream.run(partial(self._gather_piece, whole, start, shard.numel(), begin, end), name)

    def _gather_piece(self, whole: torch.Tensor, start: int, numel: int, begin: int, end: int) -> None:
        """All-gather elements ``begin`` to ``end`` of every rank's shard, which has ``numel``."""
        own = whole[start + begin : start + end]
        if end - begin == numel:
            dist.all_gather_into_tensor(whole, own, group=self.process_group)
            return
        ranks = whole.numel() // numel
        piece = self._buffer(whole, numel)[: (end - begin) * ranks]
        dist.all_gather_into_tensor(piece, own, group=self.process_group)
        whole.view(ranks, numel)[:, begin:end].copy_(piece.view(ranks, end - begin))

    def _elements(self, whole: torch.Tensor, numel: int) -> int:
        ranks = whole.numel() // numel
        pieces = shard_pieces(whole.nbytes, ranks)
        return -(-numel // pieces) * ranks if pieces > 1 else 0

    def close(self) -> None:
        self._copies.close()
        super().close()
