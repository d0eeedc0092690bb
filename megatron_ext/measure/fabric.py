"""What one rank of a measurement holds: its place, its process groups, memory shared with
the node's other ranks, and a barrier that is cheaper than what is measured.

A gloo barrier takes 100 to 4000 us on oversubscribed processors; polling one flag a rank
in shared memory takes a few. Ranks of one node only.
"""

from __future__ import annotations

import mmap
import os
import time

import torch
import torch.distributed as dist

from megatron_ext.measure.options import MIB, Options
from megatron_ext.runtime.device import device_of

LINE = 8
"""int64 words between two flags: one cache line each."""

WORDS = 64
"""Control words that rank 0 (or the leader of a group) writes and the others read."""

ARENA_BYTES = 64 * MIB
"""Successive rounds walk through at least this much memory: in a run one group follows the
other, so none of them is found in the caches."""


def shared_bytes(options: Options) -> int:
    """Size of the block that the launcher creates and every rank maps: flags, control words,
    and one host copy a pipeline rank."""
    return _control_bytes(options) + options.pipeline_model_parallel_size * arena_bytes(options)


def arena_bytes(options: Options) -> int:
    size = options.rounded(max(options.largest, ARENA_BYTES))
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _control_bytes(options: Options) -> int:
    size = 8 * LINE * (options.world_size + WORDS)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Fabric:
    """One rank. ``block`` is the descriptor of the shared memory."""

    def __init__(self, options: Options, rank: int, block: int):
        self.options, self.rank, self.world_size = options, rank, options.world_size
        dp, pp = options.data_parallel_size, options.pipeline_model_parallel_size
        # Megatron's default order tp-cp-ep-dp-pp: data-parallel ranks are neighbours.
        self.pp_rank, self.dp_rank = divmod(rank, dp)
        use_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
        self.torch_device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
        if use_cuda:
            torch.cuda.set_device(self.torch_device)
        self.device = device_of(torch.empty(0, device=self.torch_device))
        self._map = mmap.mmap(block, shared_bytes(options))
        os.close(block)
        words = memoryview(self._map).cast("q")
        self._flags = words[: LINE * self.world_size]
        self._words = words[LINE * self.world_size : LINE * (self.world_size + WORDS)]
        self._barriers = 0
        self._host: torch.Tensor | None = None
        self._arena: torch.Tensor | None = None
        backend = "nccl" if use_cuda else "gloo"
        self.data, self.data_busy = (
            self._own_group([[first * dp + index for index in range(dp)] for first in range(pp)], backend) for _ in range(2)
        )
        self.pipe, self.pipe_busy = (
            (self._own_group([[stage * dp + index for stage in range(pp)] for index in range(dp)], backend) if pp > 1 else None)
            for _ in range(2)
        )

    def _own_group(self, lists: list[list[int]], backend: str):
        """Make all groups (every rank has to) and return the one that this rank is in."""
        groups = [dist.new_group(ranks, backend=backend) for ranks in lists]
        return next(group for group, ranks in zip(groups, lists) if self.rank in ranks)

    # -- agreement --------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every rank has called it. A rank that dies is the launcher's to notice."""
        self._barriers += 1
        self._flags[self.rank * LINE] = self._barriers
        polls = 0
        while any(self._flags[rank * LINE] < self._barriers for rank in range(self.world_size)):
            polls += 1
            if polls <= 200:
                os.sched_yield()
            else:  # whoever waits long must not take processor time from those who measure
                time.sleep(20e-6 if polls < 250 else 1e-3)

    def agree(self, value: int) -> int:
        """Rank 0's ``value``, on every rank."""
        if self.rank == 0:
            self.post(0, value)
        self.barrier()
        agreed = self.read(0)
        self.barrier()
        return agreed

    def post(self, word: int, value: int) -> None:
        assert 0 <= word < WORDS
        self._words[word * LINE] = value

    def read(self, word: int) -> int:
        return self._words[word * LINE]

    # -- memory -----------------------------------------------------------------------------

    @property
    def host(self) -> torch.Tensor:
        """The node's host copy of this pipeline rank, float32, shared by its data-parallel ranks."""
        if self._host is None:
            size = arena_bytes(self.options)
            offset = _control_bytes(self.options) + self.pp_rank * size
            self._host = torch.frombuffer(self._map, dtype=torch.float32, count=size // 4, offset=offset)
            share = self._host.numel() // self.options.data_parallel_size
            self._host[self.dp_rank * share :][:share].fill_(1.0)  # touch the pages once, before timing
            self.barrier()
            self.device.pin(self._host)
        return self._host

    @property
    def arena(self) -> torch.Tensor:
        """This rank's device memory for whole groups, float32."""
        if self._arena is None:
            self._arena = torch.ones(arena_bytes(self.options) // 4, device=self.torch_device)
        return self._arena

    def window(self, memory: torch.Tensor, size_bytes: int, turn: int) -> torch.Tensor:
        """A group of ``size_bytes`` in ``memory``; successive turns lie side by side."""
        numel = size_bytes // 4
        places = memory.numel() // numel
        return memory.narrow(0, (turn % places) * numel, numel)

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This data-parallel rank's share, a view of ``whole`` as in Megatron's buckets."""
        numel = whole.numel() // self.options.data_parallel_size
        return whole.narrow(0, self.dp_rank * numel, numel)
