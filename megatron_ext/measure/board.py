"""Barriers and shared numbers of the ranks of a measurement.

On one node they are in shared memory: torch's barrier takes 100 to 4000 us on oversubscribed processors,
one flag per rank takes a few tens. Between nodes they are torch's store and barrier.

[Note: Yielding, then sleeping]
Ranks yield their processor (sched_yield) until all ranks have arrived. If that takes long they sleep, because a rank
that waits must not take processor time from ranks that measure.
"""

import os
import time

import torch.distributed as dist

LINE = 8
"""int64 words between two flags: one cache line each."""

WORDS = 128
"""Control words: word 0 belongs to rank 0, the others to leaders of groups."""


POLLS = 200
"""Polls before sleeping: half a millisecond if no other process runs."""

SLEEP_S = 2e-5
"""Time between two polls of a rank that sleeps. With the kernel's timer slack it is about 70 us, roughly the time of a
wake-up."""


class SharedBoard:
    """A board in memory that all ranks map. The launcher notices a rank that dies."""

    def __init__(self, memory: memoryview, rank: int, world_size: int):
        words = memory.cast("q")
        self.rank, self.world_size = rank, world_size
        self._flags = words[: LINE * world_size]
        self._words = words[LINE * world_size : LINE * (world_size + WORDS)]
        self._barriers = 0

    @staticmethod
    def size_bytes(world_size: int) -> int:
        """Bytes of memory that a board of ``world_size`` ranks takes."""
        return 8 * LINE * (world_size + WORDS)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._barriers += 1
        self._flags[self.rank * LINE] = self._barriers
        looks = 0
        while any(self._flags[rank * LINE] < self._barriers for rank in range(self.world_size)):
            if looks < POLLS:
                os.sched_yield()
            else:
                time.sleep(SLEEP_S)
            looks += 1

    def post(self, word: int, value: int) -> None:
        """Let every rank read ``value`` in ``word``."""
        assert 0 <= word < WORDS
        self._words[word * LINE] = value

    def read(self, word: int) -> int:
        """The value that was last posted in ``word``."""
        return self._words[word * LINE]


class StoreBoard:
    """A board in torch's store, for ranks on several nodes. ``group``: a process group of all ranks, over host
    memory."""

    def __init__(self, store, group):
        self._store = dist.distributed_c10d.PrefixStore("megatron_ext_measure", store)
        self._group = group

    def barrier(self) -> None:
        dist.barrier(self._group)

    def post(self, word: int, value: int) -> None:
        self._store.set(str(word), str(value))

    def read(self, word: int) -> int:
        return int(self._store.get(str(word)))


Board = SharedBoard | StoreBoard
