"""Device memory for tensors that come and go within an iteration, taken from the device before the first step.

[Note: No allocation waits for the device]
torch's caching allocator asks the driver for memory if it has no free block, and returns blocks if the driver has no
memory left. Both wait for the whole device. Whole groups and gradients therefore come from a pool of their own. Before
the first iteration, everything that an iteration takes from the pool is taken and given back once, in the same order
(:func:`rehearse`). The allocator's choices depend only on sizes and order, and every iteration begins and ends with an
empty pool, so later iterations find their blocks in it. Groups that are made whole outside the program (for an
evaluation, a checkpoint) do not use this pool: their memory is given back afterwards.

If the device is full, torch may take free blocks of the pool for activations. The pool then asks the driver for memory.
Some releases of torch do not return their other free blocks to the driver for it, so we do.
Source: PyTorch, torch.cuda.MemPool and its issue 175015.
"""

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_ext.runtime.gradients import Gradient, Reducer
from megatron_ext.runtime.group import Clock, FreedGroup, RankGroup
from megatron_ext.runtime.program import Layers, place_actions
from megatron_ext.runtime.recorder import NOTHING
from megatron_ext.runtime.streams import Device
from megatron_ext.schedule.user_defined_schedule import Rank, Schedule

LEAST_TORCH = (2, 8)
"""Older releases do not count a pool that is entered again as in use."""

ROUNDS = 3
"""Number of rehearsals, after which the pool is left as it is."""


class MemoryPool:
    """The pool of one rank. On the host, and on a device without such pools, memory comes from the usual allocator."""

    def __init__(self, device: Device):
        self._missing = _missing() if device.kind == "cuda" else None
        self._pool = _new_pool() if device.kind == "cuda" and self._missing is None else None
        self._used = True
        self._bytes = self._peak = 0  # bytes in use now, and their maximum

    def serve(self, held: RankGroup | Gradient) -> None:
        """Take the memory of ``held`` from this pool."""
        if self._pool is not None and isinstance(held, (FreedGroup, Gradient)):
            held.resize = partial(self._resize, held.resize, held.bytes)

    def _resize(self, resize: Callable[[int], object], bytes_held: int, size: int) -> None:
        if not size or not self._used or self._pool is None:
            resize(size)
        else:
            try:
                with torch.cuda.use_mem_pool(self._pool):
                    resize(size)
            except torch.cuda.OutOfMemoryError:  # torch may still hold free blocks of other pools
                torch.cuda.empty_cache()
                with torch.cuda.use_mem_pool(self._pool):
                    resize(size)
        self._bytes += size or -bytes_held
        self._peak = max(self._peak, self._bytes)

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Within this context, resizes take their memory from the usual allocator."""
        self._used = False
        try:
            yield
        finally:
            self._used = True

    def fill(self, rehearsal: Callable[[], None]) -> str | None:
        """Take the memory that ``rehearsal`` takes and gives back. Returns one line that the user has to know, or None.

        The allocator rounds sizes, and cuts blocks in the order of requests. Whether taking one block of the peak size
        first saves memory depends on the sizes. So both ways are tried and the smaller pool is kept.
        """
        if self._pool is None:
            return self._missing and _no_pool(self._missing)
        torch.cuda.empty_cache()
        self._bytes = self._peak = 0
        try:
            in_order = self._take(rehearsal, 0)
            taken = self._take(rehearsal, self._peak)
            if taken > in_order:
                taken = self._take(rehearsal, 0)
        except RuntimeError as error:  # OutOfMemoryError is a subclass
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            if not full and "expandable_segments" not in str(error):  # torch 2.8 refuses any pool with these
                raise
            self._pool = None
            torch.cuda.empty_cache()
            return _no_pool(
                "the device has no room for a" if full else "with expandable_segments this PyTorch makes no"
            )
        if taken <= 1.1 * self._peak:
            return None
        peak, taken = self._peak / 1e9, taken / 1e9
        return f"the pool of whole groups and gradients has {taken:.2f} GB, for a peak of {peak:.2f} GB"

    def close(self) -> None:
        """Give the pool up; what is still in use stays. Otherwise the last reference could go with the model, while
        another run allocates from its own pool, and torch ends the process then."""
        self._pool = None

    def _take(self, rehearsal: Callable[[], None], first_bytes: int) -> int:
        """Begin a new pool with a block of ``first_bytes``; returns the bytes that the pool takes from the device."""
        self._pool = None
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        self._pool = _new_pool()
        with torch.cuda.use_mem_pool(self._pool):
            torch.empty(first_bytes, dtype=torch.uint8, device="cuda")
        reserved = -1
        for _ in range(ROUNDS):
            if reserved == torch.cuda.memory_reserved():
                break
            reserved = torch.cuda.memory_reserved()
            rehearsal()
        return torch.cuda.memory_reserved() - before


def _missing() -> str | None:
    """Why there is no pool, as the begin of a line; None if there may be one."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < LEAST_TORCH:
        return f"PyTorch {torch.__version__} makes no"
    given = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "with backend:cudaMallocAsync PyTorch makes no" if "cudaMallocAsync" in given else None


def _no_pool(why: str) -> str:
    return f"{why} pool of whole groups and gradients; at first torch's allocator may wait for the device"


def _new_pool():
    """A new pool. torch may use its free blocks for other purposes before it is out of memory, if it can do so."""
    known = inspect.signature(torch.cuda.MemPool.__init__).parameters
    options: Any = {"use_on_oom": True} if "use_on_oom" in known else {}  # newer releases only
    return torch.cuda.MemPool(**options)


class _Ready:
    """A handle, and a route, without transfers."""

    def wait(self) -> None:
        """Nothing was issued."""

    def issue(self, group: RankGroup) -> "_Ready":
        return self

    def stage_in(self, group: RankGroup, slot: int) -> None:
        """Nothing is read."""


class _Unreduced(Reducer):
    """Allocates and frees gradients, but adds nothing up."""

    def __init__(self, reducer: Reducer):
        vars(self).update(vars(reducer), on_host=frozenset(), order=None, sample=None, complete=None, _recorder=NOTHING)
        self._issues = {gradient: gradient.issue for gradient in reducer.gradients.values()}
        for gradient in self._issues:
            gradient.issue = _Ready

    def _add(self, gradient: Gradient, part: torch.Tensor) -> None:
        """There is nothing to add."""

    def give_back(self) -> None:
        """Restore the gradients."""
        for gradient, issue in self._issues.items():
            gradient.forget()
            gradient.issue = issue
        self.residency.bytes = 0


def rehearse(
    schedule: Schedule, rank: Rank, groups: dict[int, RankGroup], clock: Clock, layers: Layers, reducer: Reducer | None
) -> None:
    """Run one iteration of the program without transfers and compute, so that memory is taken and freed as in training.
    No group is whole at the begin or the end, even if the device runs out of memory."""
    unreduced = _Unreduced(reducer) if reducer is not None else None
    start, steps = place_actions(schedule, rank, groups, defaultdict(_Ready), clock, layers, reducer=unreduced)
    try:
        for action in (*start, *(action for step in steps for action in step.in_order())):
            action()
    finally:
        for group in groups.values():
            group.drop()
        if unreduced is not None:
            unreduced.give_back()
