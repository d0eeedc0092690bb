"""A unit of the host's optimizer: parameters that one optimizer steps together."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW
from megatron_ext.runtime.host_step.room import HALF_PER_WIDE, Piece, Room

ALIGNMENT = 64
"""Alignment in bytes of each copy of a state."""


class Rooms(Protocol):
    """Provides rooms for units; used on the issuing thread."""

    def has_room(self, unit: Any) -> bool: ...

    def take(self, unit: Any) -> Room: ...

    def free(self, unit: Any) -> None: ...


class HostUnit:
    """Parameters of one optimizer, whose states are in memory.

    Args:
        group: index in the schedule of the group that holds the parameters, or of one of several.
        rooms: where gradients arrive and parameters leave.
        alignment: alignment in bytes of each gradient in a room.
        later: all shards, including those in host memory, are written only when the unit leaves its room.

    Attributes:
        stepped: called after each step of the optimizer, on the thread that stepped.
        begun_ns: when the last step began.
        read_ns: how long the last step waited for its states.
    """

    begun_ns = read_ns = 0

    def __init__(self, group: int, optimizer: FlatAdamW, pieces: list[Piece], rooms: Rooms, alignment=4, later=False):
        self.group, self.optimizer, self.pieces, self.rooms, self.later = group, optimizer, pieces, rooms, later
        self.starts, self.bytes = [], 0
        for parameter, _, shard, *_ in pieces:
            assert parameter.dtype is torch.float32 and shard.dtype.itemsize * HALF_PER_WIDE == parameter.element_size()
            self.starts.append(self.bytes)
            self.bytes += -(-parameter.numel() * parameter.element_size() // alignment) * alignment
        self.room: Room | None = None
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._in_place = self._begun = False
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # each tensor, and its copy from before an early step
        self.stepped: Callable[[HostUnit], None] = lambda unit: None
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    @property
    def stay(self) -> bool:
        """Whether its parameters and states never move."""
        return bool(self.optimizer.whole)

    # On the issuing thread.

    def has_room(self) -> bool:
        return self.rooms.has_room(self)

    def arrive(self, behind: Sequence[Any], gradients: Sequence[torch.Tensor | None] | None = None) -> None:
        """Queue the copies of the gradients, which are ready after the events ``behind``.

        Args:
            gradients: copied in any case, and used instead of the gradients of the pieces. None: use those of the
                pieces, in place if they are fp32 in host memory.
        """
        self.room, self._in_place = self.rooms.take(self), gradients is None
        self._gradients = [piece.gradient() for piece in self.pieces] if gradients is None else gradients
        self.room.arrive(self, self._gradients, behind)

    def leave(self) -> None:
        """Queue the copies of the parameters to the device, and release the room."""
        assert self.room is not None
        self.room.leave(self)
        self.give_up()

    def give_up(self) -> None:
        """Release the room: the unit was stepped, or will not be."""
        assert self.room is not None
        self.room, self._gradients, self._begun = None, (), False
        self.rooms.free(self)

    def write_shards(self) -> None:
        """Copy the values of the parameters to the shards, on the device or on the host."""
        with torch.no_grad():
            for piece in self.pieces:
                piece.shard.copy_(piece.parameter)

    # On the thread that steps.

    def wait_for_gradients(self) -> None:
        """Wait until the gradients from the device are in the room."""
        assert self.room is not None, "a unit is stepped before its gradients were brought"
        self.room.wait()

    def begin(self) -> None:
        """Set the gradients of the parameters, after :meth:`wait_for_gradients`; the step follows."""
        assert self.room is not None
        in_room = self.room.begin(self, self._gradients, self._in_place)
        self.optimizer.gradients_at = self.room if in_room else None
        self._begun = True

    def _before_step(self) -> None:
        if not self._begun:
            self.wait_for_gradients()
            self.begin()
        self.begun_ns = perf_counter_ns()

    @torch.no_grad()
    def _after_step(self) -> None:
        assert self.room is not None
        if self.room.recorder.counts:
            self.room.recorder.moved("step", "host_memory", self._step_bytes(self.room.cast_on_device))
        if not (self.later or self.room.cast_on_device):
            for piece in self.pieces:
                if piece.shard_on_host:
                    piece.shard.copy_(piece.parameter)
        self.room.end(self)
        self._begun = False
        self._let_go()
        self.stepped(self)

    def _step_bytes(self, cast_on_device: bool) -> int:
        """Gradients are read; states are read and written; 16-bit parameters are written if the host rounds them."""
        total = 0
        for piece in self.pieces:
            if piece.parameter.grad is not None:
                total += piece.parameter.grad.nbytes + 2 * held_bytes(self.optimizer, piece.parameter)
                total += 0 if cast_on_device else piece.shard.nbytes
        return total

    def _let_go(self) -> None:
        """The states are not needed until the next step."""

    # Steps that may not count, see early.py.

    def rollback_bytes(self) -> int:
        """Size of the copy of the states."""
        return sum(map(_aligned, self.optimizer.whole))

    def step_early(self, memory: torch.Tensor) -> None:
        """Copy the states into ``memory`` (1D uint8), and step; runs on the thread."""
        assert self.room is not None
        start = 0
        for tensor in self.optimizer.whole:
            copy = memory[start : start + tensor.nbytes].view(tensor.dtype)
            self._saved.append((tensor, copy.copy_(tensor)))
            start += _aligned(tensor)
        *states, _ = self.optimizer.whole  # the last are step counts, which the byte bill does not count
        self.room.recorder.moved("states", "host_memory", 2 * sum(tensor.nbytes for tensor in states))
        self.optimizer.step()

    def keep(self) -> None:
        """The early step counts."""
        self._saved = []

    @torch.no_grad()
    def take_back(self) -> None:
        """Restore the states from before the early step."""
        for tensor, copy in self._saved:
            tensor.copy_(copy)
        self._saved = []

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()


def held_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Bytes of ``parameter`` and its states, without scalars that are kept as tensors. Megatron's host optimizer lists
    the parameter itself among its states."""
    held = {id(t): t.nbytes for t in optimizer.state[parameter].values() if torch.is_tensor(t) and t.dim()}
    return sum((held | {id(parameter): parameter.nbytes}).values())


def _aligned(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size + -size % ALIGNMENT
