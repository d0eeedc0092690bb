"""Gathers that go through a buffer or in pieces, on their own stream and with their own process group."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.recorder import NOTHING, log_of
from megatron_ext.runtime.routes.stream_route import StreamRoute
from megatron_ext.runtime.streams import Arrival


class BufferedGather(StreamRoute):
    """Gathers whole groups from shards; one instance per rank.

    Args:
        process_groups: used only by this route, and destroyed with it.
        device: see :mod:`megatron_ext.runtime.device`.
        recorder: where gathers are recorded.
    """

    def __init__(self, name: str, process_groups: Sequence[dist.ProcessGroup], device, recorder=NOTHING):
        super().__init__(name, device)
        self.stream.log = log_of(recorder, "gather", "network", "gpu")
        self._process_groups = process_groups
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def issue(self, group: RankGroup) -> Arrival:
        """Gather the group; the route's ``issue``."""
        arrival = self.arrival(group.index)
        return self.gather(group.whole, group.shard, group.shard_start, arrival, f"unshard {group.index}")

    def gather(
        self, whole: torch.Tensor, shard: torch.Tensor, start: int, arrival: Arrival | None = None, name: str = ""
    ) -> Arrival:
        """Fill ``whole`` (1D) from all ranks' shards; returns at once. ``start``: place of this rank's shard."""
        arrival = arrival or Arrival(self.device).begin()
        self.stream.wait(arrival.taken)
        self._queue(whole, shard, start, arrival.taken, name)
        if self.stream.log is not None:
            self.stream.log.count(whole.nbytes - shard.nbytes)
        return arrival.end(self.stream)

    def _queue(self, whole: torch.Tensor, shard: torch.Tensor, start: int, taken, name: str) -> None:
        """Queue all work on :attr:`stream`, which has waited for ``taken``: ``whole`` may be written."""
        self.stream.run(partial(self._gather, whole, shard), name)

    def _gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather on the device, or on the stream's thread."""
        raise NotImplementedError

    def make_buffers(self, groups: Iterable[RankGroup]) -> None:
        """Allocate the buffers for ``groups`` on the device; call it before the first step."""
        for group in groups:
            self._buffer(group.whole, group.shard.numel())

    def connect(self) -> None:
        """Connect the ranks, after :meth:`make_buffers` and before the first step. Collective: on CUDA a rank waits
        here for all others, so all must have their memory by now."""
        self.stream.wait(self.device.compute.record(self.device.event()))  # after users of the buffers' memory
        for process_group in self._process_groups:
            self.stream.run(partial(self._connect, process_group))

    def _connect(self, process_group: dist.ProcessGroup) -> None:
        """Run the first gather. In it torch makes NCCL's communicator, and NCCL allocates what such gathers need."""
        ranks = dist.get_world_size(process_group)
        memory = max((torch.empty(ranks + 1, device=self.device.device), *self._buffers.values()), key=torch.numel)
        numel = memory.numel() // (ranks + 1)
        dist.all_gather_into_tensor(memory[: ranks * numel], memory[ranks * numel :][:numel], group=process_group)

    def _buffer(self, whole: torch.Tensor, numel: int) -> torch.Tensor:
        """The buffer for ``whole`` with shards of ``numel``. It is kept for all gathers, which run one after another. A
        buffer that is too small is replaced; this happens only in ``measure``, which does not time it."""
        size, buffer = self._elements(whole, numel), self._buffers.get(whole.dtype)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[whole.dtype] = torch.empty(size, dtype=whole.dtype, device=whole.device)
        return buffer

    def _elements(self, whole: torch.Tensor, numel: int) -> int:
        """Number of elements of the buffer: the whole group, and the shard that is sent."""
        return whole.numel() + numel

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that groups are gathered in."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def close(self) -> None:
        """Destroy the process groups, whose communicators hold device memory, unless a script has destroyed all."""
        super().close()
        for group in self._process_groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)
