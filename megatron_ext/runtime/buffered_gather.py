"""All-gathers that go through a buffer: on CUDA on a stream of their own, on CPU on a thread.

The process groups are their own. On CPU a thread issues one gather after another; on CUDA the training thread issues
them, as NCCL wants one order over all communicators.
"""

from abc import ABC, abstractmethod
from time import perf_counter_ns

import torch

from megatron_ext.runtime.group import Group
from megatron_ext.runtime.worker import Transfer, Worker


class BufferedGather(ABC):
    """Gathers groups through buffers; one instance a rank.

    Args:
        device: see :mod:`megatron_ext.runtime.device`.
    """

    def __init__(self, device):
        self.device, self.stream = device, device.copy_stream()
        self.worker = Worker("buffered-gather") if self.stream is None else None
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def issue(self, whole: torch.Tensor, shard: torch.Tensor, done=None) -> Transfer:
        """Fill ``whole`` (1D) from all ranks' shards; returns at once. ``done(start_ns, end_ns)`` is
        called when it is full, on CPU."""
        after = self.device.mark()
        if self.worker is None:
            transfer = Transfer()
            transfer.after = self.device.on_stream(lambda: self._gather(whole, shard), self.stream, after)
            transfer.finish()
            return transfer

        def gather(transfer: Transfer) -> None:
            start = perf_counter_ns()
            self._gather(whole, shard)
            if done is not None:
                done(start, perf_counter_ns())

        return self.worker.submit(gather)

    @abstractmethod
    def _gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather, in the order of the current stream."""

    def _buffer(self, dtype: torch.dtype, numel: int, device: torch.device) -> torch.Tensor:
        """Kept from gather to gather, which run one after another."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=device)
        return buffer

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that groups are gathered in."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


class BufferedRoute:
    """The gpu route of groups that have an ``algorithm``."""

    name = "gpu"

    def __init__(self, gather: BufferedGather, recorder=None):
        self.gather, self.recorder = gather, recorder

    def issue(self, group: Group) -> Transfer:
        recorder = self.recorder
        if recorder is None:
            return self.gather.issue(group.whole, group.shard)
        name = f"unshard {group.index}"
        return self.gather.issue(group.whole, group.shard, lambda start, end: recorder.add("gpu", name, start, end))

    @property
    def buffer_bytes(self) -> int:
        return self.gather.buffer_bytes

    def close(self) -> None:
        self.gather.close()
