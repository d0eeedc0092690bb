"""Slots of a fixed number through which gradients arrive at the host's optimizer and new parameters leave it.

[Note: A step through slots]
The parameters of a host optimizer are divided into units, each stepped by an optimizer of its own. The gradient of a
unit is copied into a slot, fp32 in page-locked host memory, while the units before it are stepped. Behind its step the
new parameters leave for the device while the next unit is stepped. The two directions have a stream each.

Parameters become 16-bit in one of two places. On the host: they are cast into a page-locked slot of half the size, from
where 2 bytes each go to the device. Or on the device: the optimizer's own fp32 parameters are moved to page-locked
memory once, 4 bytes each go from there to a slot on the device, and are cast from it. That costs the host less and the
link more. Gradients in 16 bits become fp32 in the same place, through the same slots. Shards and gradients that rest in
host memory are cast and read where they are.

The arithmetic is the optimizer's own on the same values, so training is the same to the last bit.
Source: ZeRO-Offload (arXiv 2101.06840), section 4.1, and SuperOffload (arXiv 2509.21271) on where casts are cheapest.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from megatron_ext.runtime.early_steps import StepUnit
from megatron_ext.runtime.worker import Transfer
from megatron_ext.workload.state_layout import tensor_bytes

HALF_PER_SLOT = 2
"""fp32 bytes for each byte of a 16-bit slot."""


class PassingUnit:
    """Parameters whose gradients arrive, and which leave, together.

    Args:
        optimizer: steps these parameters alone, fp32 tensors in host memory.
        gradients: by parameter, calls that return its gradient, of any float dtype and shape, or None.
        shards: by parameter, the device's tensor that a step writes.
        gradients_on_host: parameters whose gradients lie in host memory.
        shards_on_host: parameters whose shards do.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: dict[torch.Tensor, Callable[[], torch.Tensor | None]],
        shards: dict[torch.Tensor, torch.Tensor],
        gradients_on_host: frozenset[torch.Tensor] = frozenset(),
        shards_on_host: frozenset[torch.Tensor] = frozenset(),
    ):
        self.optimizer, self.gradients, self.shards = optimizer, gradients, shards
        self.gradients_on_host, self.shards_on_host = gradients_on_host, shards_on_host
        self.starts, self.bytes = {}, 0  # byte at which each gradient begins in a slot
        for parameter, shard in shards.items():
            assert parameter.dtype is torch.float32 and shard.dtype.itemsize * HALF_PER_SLOT == parameter.element_size()
            self.starts[parameter] = self.bytes
            self.bytes += tensor_bytes(parameter.numel())
        self.slot: int | None = None
        self.arrived = None  # what ends when the gradients are in the slot
        self.narrow: list[tuple[torch.Tensor, torch.Tensor]] = []  # a gradient in the slot, and where it is in 16 bits

    def view(self, slot: torch.Tensor, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The place of ``parameter`` in ``slot``, 1D uint8, as ``dtype``."""
        start = self.starts[parameter] * dtype.itemsize // torch.float32.itemsize
        return slot[start : start + parameter.numel() * dtype.itemsize].view(dtype).view(parameter.shape)

    def leaving(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters whose shards lie on the device, and these."""
        return [pair for pair in self.shards.items() if pair[0] not in self.shards_on_host]


class StepSlots:
    """The slots of one rank, see the note above.

    Args:
        units: all that pass through them.
        slots, slot_bytes: pieces of host memory, at least 2, and bytes of each, which hold the gradients of any unit.
        cast: where parameters become 16-bit, ``host`` or ``device``.
        wide: gradients on the device are fp32.
        place: the device of the shards.
        device: see :mod:`megatron_ext.runtime.device`.
    """

    def __init__(
        self, units: list[PassingUnit], slots: int, slot_bytes: int, cast: str, wide: bool, place: torch.device, device
    ):
        assert slots >= 2 and all(unit.bytes <= slot_bytes for unit in units)
        self.units, self.number, self._device = units, slots, device
        self._places = {parameter: number for number, unit in enumerate(units) for parameter in unit.shards}
        self._gradients = self._pieces(slots, slot_bytes)
        self._half = self._pieces(slots, slot_bytes // HALF_PER_SLOT) if cast == "host" else []
        # One a direction: each direction's copies have an order on their stream.
        staged = 0 if cast == "host" else 2 - wide
        self._staging = [torch.empty(slot_bytes, dtype=torch.uint8, device=place) for _ in range(staged)]
        self.slots_bytes = sum(map(len, [*self._gradients, *self._half]))
        self.device_bytes = staged * slot_bytes
        self._arriving, self._leaving = device.copy_stream(), device.copy_stream()
        self._left: list = [None] * slots  # the last copy out of each slot of 16-bit parameters
        self._next = 0  # the slot that is taken next, in turn, as units are stepped in the order of their arrival
        self._emptied: list[Transfer | None] = [None] * slots  # when the last unit in each slot has been stepped
        self._expected: deque[PassingUnit] = deque()
        self._computed = None  # the gradients of the units that are expected are ready behind it
        self._hooks = []
        for unit in units:
            if cast == "device":
                self._lock_pages(unit)
            self._hooks.append(unit.optimizer.register_step_pre_hook(partial(self._before, unit)))
            self._hooks.append(unit.optimizer.register_step_post_hook(partial(self._after, unit)))

    def _pieces(self, slots: int, size: int) -> list[torch.Tensor]:
        return list(self._device.host_tensor(slots * size, torch.uint8).split(size))

    @torch.no_grad()
    def _lock_pages(self, unit: PassingUnit) -> None:
        """Move the parameters to page-locked memory."""
        sizes = [parameter.numel() for parameter in unit.shards]
        memory = self._device.host_tensor(sum(sizes), torch.float32)
        for parameter, own in zip(unit.shards, memory.split(sizes), strict=True):
            parameter.data = own.view(parameter.shape).copy_(parameter)

    # Gradients.

    def _has_room(self) -> bool:
        emptied = self._emptied[self._next]
        return emptied is None or emptied.ended

    def wait_for_room(self) -> None:
        """Until a slot is empty; its unit is stepped by another thread."""
        emptied = self._emptied[self._next]
        if emptied is not None:
            emptied.wait()

    def expect(self, units: list[PassingUnit]) -> None:
        """``units`` will be stepped in this order; their gradients are ready once the current stream has done its
        work."""
        assert not self._expected
        self._expected, self._computed = deque(units), self._device.mark()
        self._fill()

    def _fill(self) -> None:
        while self._expected and self._has_room():
            unit = self._expected.popleft()
            gradients = {parameter: gradient() for parameter, gradient in unit.gradients.items()}
            copy = partial(self.arrive, unit, gradients, in_place=True)
            unit.arrived = self._device.on_stream(copy, self._arriving, self._computed)

    @torch.no_grad()
    def arrive(self, unit: PassingUnit, gradients: Mapping[torch.Tensor, torch.Tensor | None], in_place=False) -> None:
        """Copy the gradients of ``unit`` into a slot; queued on the current stream.

        Args:
            in_place: those that are fp32 in host memory are stepped on where they are, and not copied.
        """
        assert self._has_room()
        slot, self._next = self._next, (self._next + 1) % self.number
        unit.slot, self._emptied[slot] = slot, Transfer()
        left = self._left[slot] if self._half else None
        for parameter, gradient in gradients.items():
            if gradient is None:
                parameter.grad = None
                continue
            gradient, own = gradient.view(parameter.shape), unit.view(self._gradients[slot], parameter)
            on_host = parameter in unit.gradients_on_host
            if in_place and on_host and gradient.dtype is torch.float32:
                own = gradient
            elif on_host or gradient.dtype is torch.float32:
                own.copy_(gradient, non_blocking=True)
            elif self._half:
                if left is not None:
                    left.wait()
                half = unit.view(self._half[slot], parameter, gradient.dtype)
                unit.narrow.append((own, half.copy_(gradient, non_blocking=True)))
            else:
                own.copy_(unit.view(self._staging[1], parameter).copy_(gradient), non_blocking=True)
            parameter.grad = own

    @torch.no_grad()
    def _before(self, unit: PassingUnit, *_) -> None:
        """The step of ``unit`` begins."""
        assert unit.slot is not None, "a unit is stepped whose gradients nobody has expected"
        self._device.synchronize(unit.arrived)
        for own, half in unit.narrow:
            own.copy_(half)
        unit.arrived = None
        unit.narrow.clear()

    # Parameters.

    @torch.no_grad()
    def _after(self, unit: PassingUnit, *_) -> None:
        """The step of ``unit`` has ended."""
        slot = unit.slot
        assert slot is not None
        for parameter in unit.shards_on_host:
            unit.shards[parameter].copy_(parameter)
        if self._half:
            self._device.synchronize(self._left[slot])
            for parameter, shard in unit.leaving():
                unit.view(self._half[slot], parameter, shard.dtype).copy_(parameter)
        # What reads these shards on the device lies before their gradients, which the host has waited for.
        ended = self._left[slot] = self._device.on_stream(partial(self._leave, unit, slot), self._leaving, None)
        if ended is not None:
            ended.wait()
        for parameter in unit.shards:
            parameter.grad = None
        unit.slot, emptied = None, self._emptied[slot]
        assert emptied is not None
        emptied.finish()
        self._fill()

    @torch.no_grad()
    def _leave(self, unit: PassingUnit, slot: int) -> None:
        """Copy the parameters to the device; queued on the current stream."""
        for parameter, shard in unit.leaving():
            if self._half:
                shard.copy_(unit.view(self._half[slot], parameter, shard.dtype), non_blocking=True)
            else:
                shard.copy_(unit.view(self._staging[0], parameter).copy_(parameter, non_blocking=True))

    def unit_of(self, parameter: torch.Tensor) -> int | None:
        """Number of the unit of ``parameter``; None where it does not pass through these slots."""
        return self._places.get(parameter)

    def close(self) -> None:
        """Leave the optimizers to themselves."""
        for hook in self._hooks:
            hook.remove()


class SlotUnit(StepUnit):
    """A unit of :class:`StepSlots`, stepped beside the backward.

    Args:
        index: of the unit in ``slots``.
        others: of :class:`StepUnit`.
    """

    def __init__(
        self,
        group: int,
        slots: StepSlots,
        index: int,
        gradients: dict[torch.Tensor, torch.Tensor],
        shards: dict[torch.Tensor, torch.Tensor],
        inverse_scale: Callable[[], float | None],
    ):
        super().__init__(group, slots.units[index].optimizer, gradients, shards, inverse_scale)
        self._slots, self._unit = slots, slots.units[index]

    def wait_for_room(self) -> None:
        self._slots.wait_for_room()

    def take_gradients(self) -> None:
        self._slots.arrive(self._unit, self.gradients)
