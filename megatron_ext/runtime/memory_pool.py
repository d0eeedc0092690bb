"""Device memory of what comes and goes within an iteration, taken from the device before the first step.

[Note: No allocation waits for the device]
torch's caching allocator asks the driver for memory where it has no free block of its own, and gives blocks back where
the driver has none left: both wait for the whole device. Whole groups and gradients therefore come from a pool of their
own. Before the first iteration everything that an iteration takes from it and gives back is taken and given back once,
in the same order (:func:`rehearse`). The allocator decides by sizes and order alone, and every iteration begins and
ends with an empty pool, so all later iterations find their blocks in it. What something outside of the program brings
whole (an evaluation, a checkpoint) does not come from this pool.
Source: PyTorch, torch.cuda.MemPool.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from megatron_ext.runtime.device import Device
from megatron_ext.runtime.gradients import Gradient, Reducer
from megatron_ext.runtime.group import Clock, FreedGroup, Group
from megatron_ext.runtime.program import Action, Layers, Program, compile_program
from megatron_ext.schedule.user_defined_schedule import Rank, Schedule


class MemoryPool:
    """Of one rank. On a device without such pools, and on the host, memory comes from where it always does."""

    def __init__(self, device: Device):
        has_pools = device.kind == "cuda" and hasattr(torch.cuda, "MemPool") and hasattr(torch.cuda, "use_mem_pool")
        self._pool = torch.cuda.MemPool() if has_pools else None
        self._used = True

    def serve(self, held: Group | Gradient) -> None:
        """Let the bytes of ``held`` come from here."""
        if self._pool is not None and isinstance(held, (FreedGroup, Gradient)):
            held.resize = partial(self._resize, held.resize)

    def _resize(self, resize: Callable[[int], object], size: int) -> None:
        if not size or not self._used or self._pool is None:
            resize(size)
            return
        with torch.cuda.use_mem_pool(self._pool):
            resize(size)

    @contextlib.contextmanager
    def unused(self) -> Iterator[None]:
        """What is resized in this context gets its memory elsewhere."""
        self._used = False
        try:
            yield
        finally:
            self._used = True

    def fill(self, rehearsal: Callable[[], None]) -> str | None:
        """Take what ``rehearsal`` takes and gives back; returns why that cannot be had, or None."""
        if self._pool is None:
            return None
        torch.cuda.empty_cache()
        try:
            rehearsal()
        except torch.cuda.OutOfMemoryError:
            self._pool = None
            return "the device has no room for whole groups and gradients in a pool of their own"
        return None


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

    def __init__(self, reducer: Reducer, device: Device):
        self._issued = {index: gradient.issue for index, gradient in reducer.gradients.items()}
        for gradient in reducer.gradients.values():
            gradient.issue = _Ready
        self.gradients, self.on_host, self.residency = reducer.gradients, frozenset(), reducer.residency
        self.device, self.order, self.sample, self.complete = device, None, None, None
        self._early, self._skipped, self._delay, self._in_flight, self._to_host = False, -1, None, None, None
        self._held = None

    def _add(self, gradient: Gradient, part: torch.Tensor) -> None:
        """There is nothing to add."""

    def end(self) -> None:
        super().end()
        for index, gradient in self.gradients.items():
            gradient.issue, gradient.version = self._issued[index], 0


class _AtOnce:
    """Layers that are not computed: what is armed at a boundary runs when its step does."""

    def __init__(self, layers: Layers):
        self.uses, self.num_layers = layers.uses, layers.num_layers
        self.backward_begins, self.backward_ends = layers.backward_begins, layers.backward_ends
        self.left: dict[int, deque[list[tuple[Action, ...]]]] = {}  # by chunk, of each forward that waits

    def arm(self, model_chunk_id: int, boundary: int, forward: tuple[Action, ...], backward: tuple[Action, ...]):
        def run() -> None:
            for action in forward:
                action()
            self.left[model_chunk_id][-1].append(backward)

        return run


def rehearse(
    schedule: Schedule, rank: Rank, groups: dict[int, Group], clock: Clock, layers: Layers, reducer: Reducer | None
) -> None:
    """Go through one iteration of the program, with no transfer and no compute: what has bytes when is as in training.
    No group is whole when this begins or ends."""
    routes, at_once = _Routes(), _AtOnce(layers)
    device = reducer.device if reducer is not None else None
    unreduced = _Unreduced(reducer, device) if reducer is not None and device is not None else None
    program = compile_program(schedule, rank, groups, routes, clock, at_once, reducer=unreduced)
    _run(program, at_once)
    for group in groups.values():
        group.drop()
    if unreduced is not None:
        unreduced.end()


def _run(program: Program, layers: _AtOnce) -> None:
    for action in program.start:
        action()
    for step, chunk, before, after in program.steps:
        waiting = layers.left.setdefault(chunk, deque())
        if step.kind == "F":
            waiting.append([])
        for action in before:
            action()
        # Backwards of a chunk come in the order of its forwards, and pass its boundaries from the last to the first.
        for actions in reversed(waiting.popleft()) if step.kind == "B" else ():
            for action in actions:
                action()
        for action in after:
            action()


class _Routes(dict):
    """Every route is one that makes no transfer."""

    def __missing__(self, name: str) -> _Ready:
        return _Ready()
