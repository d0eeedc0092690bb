"""Page-locked memory through which the gradients of a unit arrive at the host's optimizer and its parameters leave.

[Note: A step through a room]
1. The issuing thread queues copies of the unit's gradients into the room (``arrive``), followed by a flag.
2. The thread that steps polls the flag, takes the gradients (``begin``), steps, and rounds the new parameters to 16
   bits in the room (``end``). This needs only host memory and the CPU, so any thread may do it.
3. The issuing thread queues copies of the parameters to the device (``leave``). These need no order of their own after
   the reads of the shards in this iteration: the gradients were computed after these reads, and have arrived. But the
   previous parameters may not have been published yet, see early.py.
Each direction has its own stream. The 16-bit parameters lie where the gradients were, or in memory of their own.

Parameters become 16-bit on the host or on the device. To round them on the device, the optimizer's fp32 parameters,
which are page-locked, are copied part by part to a staging buffer on the device and rounded there. For shards that rest
in host memory, the result is copied back. That costs the host less and the link more. 16-bit gradients become fp32 on
the device in the same way. Otherwise, shards in host memory are written, and gradients in host memory read, in place.

The arithmetic is the optimizer's own on the same values, so training is bitwise the same.
Source: ZeRO-Offload (arXiv 2101.06840), section 4.1, and SuperOffload (arXiv 2509.21271) on where casts are cheapest.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from megatron_ext.runtime.flags import poll, private_flags
from megatron_ext.runtime.host_step.flat_adamw import joined, runs
from megatron_ext.runtime.recorder import NOTHING, Recorder, log_of

HALF_PER_WIDE = 2
"""fp32 bytes per byte in 16 bits."""


class Piece(NamedTuple):
    """One parameter of a unit.

    Attributes:
        parameter: the host optimizer's parameter, fp32, in host memory.
        gradient: returns the gradient for the step, of any float dtype and shape, or None.
        shard: 16-bit tensor that a step writes.
        gradient_on_host, shard_on_host: whether the gradient or the shard rests in host memory.
    """

    parameter: torch.Tensor
    gradient: Callable[[], torch.Tensor | None]
    shard: torch.Tensor
    gradient_on_host: bool = False
    shard_on_host: bool = False


class Unit(Protocol):
    """The properties of a unit that a room uses, see unit.py.

    Attributes:
        starts: for each piece, the byte at which its gradient begins in a room.
        bytes: size of all gradients in fp32.
        stay: whether its parameters never move.
        later: whether all its shards, including those in host memory, are written only when it leaves its room.
    """

    pieces: list[Piece]
    starts: list[int]
    bytes: int
    later: bool

    @property
    def stay(self) -> bool: ...


class StepStreams:
    """The streams that all rooms of a rank use, and the device's staging buffers.

    Args:
        device: see :mod:`megatron_ext.runtime.device`.
        place: the device of shards and gradients.
        inward_bytes, outward_bytes: sizes of the staging buffers on ``place``, in fp32. The first is for parameters
            that become 16-bit on the device, in parts of this size; the second for whole gradients that become fp32
            there. 0: there are none.
        recorder: where copies and steps are recorded.
    """

    def __init__(
        self, device, place: torch.device, inward_bytes: int = 0, outward_bytes: int = 0, recorder: Recorder = NOTHING
    ):
        self.device, self.recorder = device, recorder
        self.arriving = device.stream("gradients-arrive")
        self.leaving = device.stream("parameters-leave")
        self.arriving.log = log_of(recorder, "gradient", "to_host", "publish", "gradient")
        self.leaving.log = log_of(recorder, "shard", "to_device", "cpu", "parameters")
        self.returning = device.stream("parameters-return")
        self.returning.log = log_of(recorder, "shard", "to_host", "publish", "parameters")
        self.arrived, self.left = device.event(), device.event()
        # One per direction: the stream orders the copies of each direction.
        self._inward, self._outward = (
            torch.empty(size // 4, dtype=torch.float32, device=place) for size in (inward_bytes, outward_bytes)
        )
        self._rounded = torch.empty(inward_bytes // HALF_PER_WIDE, dtype=torch.uint8, device=place)
        self._is_rounded, self.returned = device.event(), device.event()
        """After the last rounding of a shard that rests in host memory, and after its copy back to host memory."""
        self.device_bytes = self._inward.nbytes + self._outward.nbytes + self._rounded.nbytes

    def staging(self, shape: torch.Size) -> torch.Tensor:
        """fp32 buffer for a gradient on its way to the host."""
        return self._outward[: shape.numel()].view(shape)

    def cast(self, piece: Piece) -> None:
        """Queue the copies of a parameter to the device, and its rounding there into the shard, wherever that rests."""
        size, stream = len(self._inward), self.leaving
        parts = zip(piece.parameter.detach().view(-1).split(size), piece.shard.view(-1).split(size), strict=True)
        for source, target in parts:
            staged = self._inward[: len(source)]
            stream.copy(staged, source)
            if not piece.shard_on_host:
                stream.run(partial(target.copy_, staged))
                continue
            rounded = self._rounded[: target.nbytes].view(target.dtype)
            stream.wait(self.returned)  # the copy back of the previous part
            stream.run(partial(rounded.copy_, staged))
            self.returning.wait(stream.record(self._is_rounded))
            self.returning.copy(target, rounded)
            self.returning.record(self.returned)

    def wait_for_arrivals(self) -> None:
        """Make the compute stream wait for the arrivals; afterwards it may change gradients."""
        self.device.compute.wait(self.arrived)

    def wait_for_leaves(self) -> None:
        """Make the compute stream wait until the parameters are on the device."""
        self.device.compute.wait(self.left)

    def close(self) -> None:
        for stream in (self.arriving, self.leaving, self.returning):
            stream.close()


class Room:
    """Memory for one unit at a time, see the note above.

    Args:
        wide: 1D uint8, for the unit's gradients in fp32.
        half: 1D uint8 of half the size, for 16-bit gradients and parameters; None: parameters replace the gradients,
            and 16-bit gradients become fp32 on the device.
        cast_on_device: parameters become 16-bit on the device; they must not change until they have left.
    """

    def __init__(self, link: StepStreams, wide: torch.Tensor, half: torch.Tensor | None = None, cast_on_device=False):
        self._link, self._wide, self._half, self.cast_on_device = link, wide, half, cast_on_device
        self.recorder = link.recorder
        (self._arrived,) = private_flags(1, link.device)
        self._arrivals = 0
        self._last_left = link.device.event()
        self._places: dict[Unit, list[torch.Tensor]] = {}
        self._rounded: dict[Unit, list[tuple[torch.Tensor, ...]]] = {}  # destination and parameter
        self._narrow: list[tuple[torch.Tensor, torch.Tensor]] = []  # fp32 place of a gradient, and its 16-bit place

    def _place(self, memory: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """``start``: byte at which the gradient would begin in fp32."""
        start = start * dtype.itemsize // torch.float32.itemsize
        return memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    # On the issuing thread.

    def arrive(self, unit: Unit, gradients: Sequence[torch.Tensor | None], behind: Sequence[Any]) -> None:
        """Queue copies into the room of those ``gradients`` that lie on the device. They are ready after the events
        ``behind``."""
        link, stream, self._narrow = self._link, self._link.arriving, []
        for event in (*behind, self._last_left):  # parameters may still be leaving from the same memory
            stream.wait(event)
        for piece, start, gradient in zip(unit.pieces, unit.starts, gradients, strict=True):
            if gradient is None or piece.gradient_on_host:
                continue
            shape = piece.parameter.shape
            own = self._place(self._wide, start, shape, torch.float32)
            if gradient.dtype is torch.float32:
                stream.copy(own, gradient.view(shape))
            elif self._half is not None:
                half = self._place(self._half, start, shape, gradient.dtype)
                stream.copy(half, gradient.view(shape))
                self._narrow.append((own, half))
            else:
                staged = link.staging(shape)
                stream.run(partial(staged.copy_, gradient.view(shape)))
                stream.copy(own, staged)
        stream.record(link.arrived)
        self._arrivals += 1
        stream.store(self._arrived, self._arrivals)

    def leave(self, unit: Unit) -> None:
        """Queue the copies of the parameters to the device."""
        link, stream = self._link, self._link.leaving
        for piece, start in zip(unit.pieces, unit.starts, strict=True):
            shape = piece.parameter.shape
            if self.cast_on_device:
                link.cast(piece)
            elif piece.shard_on_host:
                if unit.later:
                    piece.shard.copy_(self._place(self._leaving, start, shape, piece.shard.dtype))
                    link.recorder.moved("shard", "host_memory", 2 * piece.shard.nbytes)
            else:
                stream.copy(piece.shard, self._place(self._leaving, start, shape, piece.shard.dtype))
        stream.wait(link.returned)
        stream.record(self._last_left)
        stream.record(link.left)

    @property
    def _leaving(self) -> torch.Tensor:
        return self._wide if self._half is None else self._half

    # On the thread that steps.

    def wait(self) -> None:
        """Wait until everything that was given to :meth:`arrive` is in the room."""
        poll(partial(self._arrived.reached, self._arrivals))

    @torch.no_grad()
    def begin(self, unit: Unit, gradients: Sequence[torch.Tensor | None], in_place: bool) -> bool:
        """Set the gradients of the parameters; call it after :meth:`wait`. ``in_place``: gradients that are fp32 in
        host memory are used in place; otherwise they are copied. Returns whether all exist and lie in the room."""
        for own, half in self._narrow:
            own.copy_(half)
            self._count_passes(own, half)
        if unit not in self._places:
            pairs = zip(unit.pieces, unit.starts, strict=True)
            self._places[unit] = [self._place(self._wide, n, own.parameter.shape, torch.float32) for own, n in pairs]
        in_room = True
        for piece, gradient, own in zip(unit.pieces, gradients, self._places[unit], strict=True):
            parameter = piece.parameter
            if gradient is None:
                parameter.grad, in_room = None, False
            elif in_place and piece.gradient_on_host and gradient.dtype is torch.float32:
                parameter.grad, in_room = gradient.view(parameter.shape), False
            else:
                parameter.grad = own
                if piece.gradient_on_host:
                    own.copy_(gradient.view(parameter.shape))
                    self._count_passes(own, gradient)
        return in_room

    def _count_passes(self, *tensors: torch.Tensor) -> None:
        """Count that the CPU has read or written ``tensors`` once."""
        self._link.recorder.moved("step", "host_memory", sum(tensor.nbytes for tensor in tensors))

    @torch.no_grad()
    def end(self, unit: Unit) -> None:
        """Round the parameters that leave for the device. Parameters that left from the same memory before have arrived
        on the device by now, because the gradients came after them."""
        rounded = self._rounded.get(unit) or self._to_round(unit)
        if unit.stay:
            self._rounded[unit] = rounded
        for place, parameter in rounded:
            place.copy_(parameter)
        for piece in unit.pieces:
            piece.parameter.grad = None

    def _to_round(self, unit: Unit) -> list[tuple[torch.Tensor, ...]]:
        rows = [
            (self._place(self._leaving, start, piece.parameter.shape, piece.shard.dtype), piece.parameter)
            for piece, start in zip(unit.pieces, unit.starts, strict=True)
            if (unit.later or not piece.shard_on_host) and not self.cast_on_device
        ]
        return [joined(rows[begin:end]) for begin, end in runs(rows)] if rows else []


class OwnRooms:
    """One room per unit, whose memory counts as gradients.

    Attributes:
        kind, bytes: the kind of memory in the memory bill, and its size.
    """

    kind = "gradients"

    def __init__(self, link: StepStreams):
        self._link, self._rooms, self.bytes = link, {}, 0

    def make(self, unit: Unit) -> None:
        """Allocate the room of ``unit``; call it before the first step."""
        self._rooms[unit] = Room(self._link, self._link.device.host_tensor(unit.bytes, torch.uint8))
        self.bytes += unit.bytes

    def has_room(self, unit: Unit) -> bool:
        return True

    def take(self, unit: Unit) -> Room:
        return self._rooms[unit]

    def free(self, unit: Unit) -> None:
        """The room stays with the unit."""


class SharedRooms:
    """A fixed number of rooms, taken in turn.

    Args:
        count, room_bytes: number of rooms, at least 2, and size of each, enough for the gradients of any unit.

    Attributes:
        kind, bytes: as in :class:`OwnRooms`.
    """

    kind = "staging_slots"

    def __init__(self, link: StepStreams, count: int, room_bytes: int, cast_on_device: bool):
        wide = link.device.host_tensor(count * room_bytes, torch.uint8).split(room_bytes)
        size, halves, self.bytes = room_bytes // HALF_PER_WIDE, [None] * count, count * room_bytes
        if not cast_on_device:
            halves = link.device.host_tensor(count * size, torch.uint8).split(size)
            self.bytes += count * size
        self._rooms = [Room(link, *memory, cast_on_device) for memory in zip(wide, halves)]
        self._users: list[Unit | None] = [None] * count
        self._next = 0

    def has_room(self, unit: Unit) -> bool:
        return self._users[self._next] is None

    def take(self, unit: Unit) -> Room:
        number, self._next = self._next, (self._next + 1) % len(self._rooms)
        assert self._users[number] is None
        self._users[number] = unit
        return self._rooms[number]

    def free(self, unit: Unit) -> None:
        self._users[self._users.index(unit)] = None
