"""Device memory of what comes and goes within an iteration, taken from the device before the first step.

[Note: No allocation waits for the device]
torch's caching allocator asks the driver for memory where it has no free block of its own, and gives blocks back where
the driver has none left: both wait for the whole device. Whole groups and gradients therefore come from a pool of their
own. Before the first iteration everything that an iteration takes from it and gives back is taken and given back once,
in the same order (:func:`rehearse`). The allocator decides by sizes and order alone, and every iteration begins and
ends with an empty pool, so later iterations find their blocks in it. What something outside of the program brings
whole (an evaluation, a checkpoint) does not come from this pool: it gives that memory back.
Source: PyTorch, torch.cuda.MemPool.
"""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_ext.runtime.gradients import Gradient, Reducer
from megatron_ext.runtime.group import Clock, FreedGroup, Group
from megatron_ext.runtime.program import Layers, place_actions
from megatron_ext.runtime.recorder import NOTHING
from megatron_ext.runtime.streams import Device
from megatron_ext.schedule.user_defined_schedule import Rank, Schedule

LEAST_TORCH = (2, 8)
"""Before, a pool that is entered again was not counted as in use."""

ROUNDS = 3
"""Rehearsals after which the pool is left as it is."""


class MemoryPool:
    """Of one rank. On a device without such pools, and on the host, memory comes from where it always does."""

    def __init__(self, device: Device):
        new_enough = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= LEAST_TORCH
        self._pool = _new_pool() if device.kind == "cuda" and new_enough else None
        self._used = True
        self._bytes = self._peak = 0  # in use: now, and the most

    def serve(self, held: Group | Gradient) -> None:
        """Let the bytes of ``held`` come from here."""
        if self._pool is not None and isinstance(held, (FreedGroup, Gradient)):
            held.resize = partial(self._resize, held.resize, held.bytes)

    def _resize(self, resize: Callable[[int], object], bytes_held: int, size: int) -> None:
        if not size or not self._used or self._pool is None:
            resize(size)
        else:
            with torch.cuda.use_mem_pool(self._pool):
                resize(size)
        self._bytes += size or -bytes_held
        self._peak = max(self._peak, self._bytes)

    @contextlib.contextmanager
    def unused(self) -> Iterator[None]:
        """What is resized in this context gets its memory elsewhere."""
        self._used = False
        try:
            yield
        finally:
            self._used = True

    def fill(self, rehearsal: Callable[[], None]) -> str | None:
        """Take what ``rehearsal`` takes and gives back. Returns what the user has to know, in one line, or None.

        The allocator rounds, and cuts blocks in the order in which they are asked for. Whether one block of the peak at
        first leads to less memory in all depends on the sizes, so both ways are tried and the smaller is kept.
        """
        if self._pool is None:
            return None
        torch.cuda.empty_cache()
        self._bytes = self._peak = 0
        try:
            in_order = self._take(rehearsal, 0)
            taken = self._take(rehearsal, self._peak)
            if taken > in_order:
                taken = self._take(rehearsal, 0)
        except RuntimeError as error:  # what says that the device is full is one
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            if not full and "expandable_segments" not in str(error):  # which 2.8 refuses with any pool
                raise
            self._pool = None
            torch.cuda.empty_cache()
            why = "the device has no room for a" if full else "with expandable_segments this PyTorch makes no"
            return (
                f"{why} pool of whole groups and gradients; torch's allocator may wait for the device in the first "
                "iterations"
            )
        if taken <= 1.1 * self._peak:
            return None
        return (
            f"the pool of whole groups and gradients takes {taken / 1e9:.2f} GB for {self._peak / 1e9:.2f} GB at once"
        )

    def _take(self, rehearsal: Callable[[], None], first_bytes: int) -> int:
        """Begin a new pool, with a block of ``first_bytes``; returns the bytes that it takes from the device."""
        self._pool = None
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        self._pool = _new_pool()
        self._rehearse(rehearsal, first_bytes)
        return torch.cuda.memory_reserved() - before

    def _rehearse(self, rehearsal: Callable[[], None], first_bytes: int) -> None:
        assert self._pool is not None
        with torch.cuda.use_mem_pool(self._pool):
            torch.empty(first_bytes, dtype=torch.uint8, device="cuda")
        reserved = -1
        for _ in range(ROUNDS):
            if reserved == torch.cuda.memory_reserved():
                return
            reserved = torch.cuda.memory_reserved()
            rehearsal()


def _new_pool():
    """Of whose free blocks torch may take some for other things before it is out of memory, where it can do that."""
    options: dict[str, Any] = {"use_on_oom": True}  # newer releases alone
    known = inspect.signature(torch.cuda.MemPool.__init__).parameters
    return torch.cuda.MemPool(**{name: value for name, value in options.items() if name in known})


class _Ready:
    """A handle, and a route, of transfers that are not made."""

    def wait(self) -> None:
        """Nothing was issued."""

    def issue(self, group: Group) -> "_Ready":
        return self

    def stage_in(self, group: Group, slot: int) -> None:
        """Nothing is read."""


class _Unreduced(Reducer):
    """Allocates and frees gradients, and adds nothing up."""

    def __init__(self, reducer: Reducer):
        vars(self).update(vars(reducer), on_host=frozenset(), order=None, sample=None, complete=None, _recorder=NOTHING)
        self._issues = {gradient: gradient.issue for gradient in reducer.gradients.values()}
        for gradient in self._issues:
            gradient.issue = _Ready

    def _add(self, gradient: Gradient, part: torch.Tensor) -> None:
        """There is nothing to add."""

    def give_back(self) -> None:
        """The gradients are as they were."""
        for gradient, issue in self._issues.items():
            gradient.forget()
            gradient.issue = issue
        self.residency.bytes = 0


def rehearse(
    schedule: Schedule, rank: Rank, groups: dict[int, Group], clock: Clock, layers: Layers, reducer: Reducer | None
) -> None:
    """Go through one iteration of the program, with no transfer and no compute: what has bytes when is as in training.
    No group is whole when this begins or ends, also where the device is out of memory."""
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
