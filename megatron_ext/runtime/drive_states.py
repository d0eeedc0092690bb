"""Optimizer states that rest on a drive and pass through a fixed number of slots in host memory.

[Note: A step through slots]
The parameters of a host optimizer are divided into units, each stepped by an optimizer of its own. What a unit
keeps (its parameters, fp32, and their moments) lies in one piece of a file. Before a unit is stepped its piece is
read into a slot, and its tensors are pointed there. After the step the slot is written back. Meanwhile the next
units are read into the other slots. The arithmetic is the optimizer's own on the same values, so training is the
same to the last bit as with states in memory.

Gradients come by slots as well: each slot has room for the gradient of a unit, which is copied there while the unit
before is stepped. A gradient that is fp32 in host memory already is used where it is.

Between its steps a unit's tensors point at one NaN: they keep their shapes, take no memory, and whoever computes
with them by mistake sees it.
Source: ZeRO-Infinity (arXiv 2104.07857), section 5.2.2, which pipelines the optimizer's reads, step and writes.
"""

import mmap
from collections.abc import Callable
from functools import partial
from math import nan
from time import perf_counter_ns

import torch

from megatron_ext.runtime import drive
from megatron_ext.runtime.drive_tensors import view
from megatron_ext.runtime.worker import LATER, Transfer, Worker
from megatron_ext.workload import state_layout
from megatron_ext.workload.drive_reads import DriveReads


class Region:
    """Where one parameter and its moments lie in a unit's piece.

    Attributes:
        parameter: the host optimizer's, fp32, any shape.
        offset: byte at which the region begins within the unit's piece, a multiple of the drive's block.
    """

    __slots__ = ("parameter", "names", "offset", "shape", "tensor_bytes")

    def __init__(self, parameter: torch.Tensor, moments: int, offset: int):
        self.parameter, self.offset, self.shape = parameter, offset, parameter.shape
        self.names: tuple[str, ...] = ()
        self.tensor_bytes = state_layout.tensor_bytes(parameter.numel())

    def view(self, slot: torch.Tensor, index: int, start: int | None = None) -> torch.Tensor:
        """Tensor ``index`` (0: the parameter) in ``slot``, 1D uint8, where the region begins at byte ``start`` (left
        out: at its offset)."""
        start = (self.offset if start is None else start) + index * self.tensor_bytes
        flat = slot[start : start + self.parameter.numel() * self.parameter.element_size()]
        return flat.view(self.parameter.dtype).view(self.shape)


class Unit:
    """Parameters that are read, stepped and written together."""

    def __init__(self, optimizer: torch.optim.Optimizer, moments: int, start: int):
        self.optimizer, self.start, self.regions, self.written = optimizer, start, [], False
        offset = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype is torch.float32
                self.regions.append(Region(parameter, moments, offset))
                offset += state_layout.region_bytes(parameter.numel(), moments)
        self.bytes = offset

    def adopt(self, slot: torch.Tensor, initial: dict[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Copy the tensors, which are in memory of their own, into ``slot``, and point them there. ``initial``:
        parameters that have no values yet, and the tensors that do."""
        for region in self.regions:
            state = self.optimizer.state.get(region.parameter, {})
            region.names = tuple(name for name, value in state.items() if _is_moment(value, region.parameter))
            for index, tensor in enumerate(self._tensors(region)):
                place = region.view(slot, index)
                place.copy_((initial or {}).get(tensor, tensor).detach())
                tensor.data = place

    def gradient_bytes(self, chosen) -> int:
        """Of the gradients of those parameters that ``chosen`` says."""
        return sum(region.tensor_bytes for region in self.regions if chosen(region.parameter))

    def point_at(self, slot: torch.Tensor) -> None:
        """Make the tensors views of ``slot``."""
        for region in self.regions:
            for index, tensor in enumerate(self._tensors(region)):
                tensor.data = region.view(slot, index)

    def let_go(self) -> None:
        """Make each tensor a view of a single NaN: it keeps its shape and takes no memory."""
        for region in self.regions:
            for tensor in self._tensors(region):
                tensor.data = torch.full((), nan, dtype=tensor.dtype).expand(region.shape)

    def _tensors(self, region: Region) -> list[torch.Tensor]:
        state = self.optimizer.state.get(region.parameter, {})
        return [region.parameter, *(state[name] for name in region.names)]


class DriveStates:
    """Lets host optimizers step with their parameters and moments on a drive, see the note above.

    Args:
        optimizers: one a unit, stepped in this order, each once an iteration. Their parameters are fp32 host tensors.
        directory: on the drive.
        moments: tensors of a parameter's shape that the optimizer keeps for it: 2 for Adam.
        slots: pieces in host memory at once, at least 2; with 3 a read, a step and a write run at the same time.
        settings: how to read and write.
        device: pins the slots.
        initial: tensors with the values of parameters that have none yet.
        gradients: by parameter, calls that return its gradient, of any float dtype, or None; those that ``in_place``
            holds are fp32 in host memory. Left out: somebody else sets ``grad`` before a step.

    Raises:
        InputError: the drive cannot hold the states.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        directory,
        *,
        moments: int,
        slots: int,
        settings: DriveReads,
        device,
        recorder=None,
        initial: dict[torch.Tensor, torch.Tensor] | None = None,
        gradients: dict[torch.Tensor, Callable[[], torch.Tensor | None]] | None = None,
        in_place: frozenset[torch.Tensor] = frozenset(),
    ):
        assert optimizers and slots >= 2
        self.units: list[Unit] = []
        start = 0
        for optimizer in optimizers:
            self.units.append(Unit(optimizer, moments, start))
            start += self.units[-1].bytes
        self.bytes, self.moments, self.recorder = start, moments, recorder
        self.slot_bytes = max(unit.bytes for unit in self.units)
        self._gradients, self._in_place = gradients or {}, in_place
        copied = self._gradients.keys() - in_place
        room = state_layout.gradient_slot_bytes(self.slot_bytes, moments) if copied else 0
        assert all(unit.gradient_bytes(copied.__contains__) <= room for unit in self.units)
        self.file = drive.open_own(directory, start, settings)
        self.slots_bytes = slots * (self.slot_bytes + room)
        self._map = mmap.mmap(-1, self.slots_bytes)
        self._memory = memoryview(self._map)
        everything = torch.frombuffer(self._map, dtype=torch.uint8)
        self._slots = list(everything[: slots * self.slot_bytes].split(self.slot_bytes))
        self._gradient_slots = list(everything[slots * self.slot_bytes :].split(room)) if room else []
        self._copies: dict[int, object] = {}  # of gradients into slots, by count of steps of units
        self._stream = device.copy_stream() if room else None
        self._computed, self._known = None, 0  # gradients of units below this count are ready
        self._device, self._pinned = device, everything
        device.pin(everything)
        self._worker = Worker("states-read")
        self._moves: list[Transfer | None] = [None] * slots  # the last write out of each slot
        self._copied: list = [None] * slots  # the last copy out of each slot to the device
        self._writes: list[Transfer | None] = [None] * len(self.units)
        self._reads: dict[int, Transfer] = {}  # by count of steps of units
        self._next = 0  # of the unit that is stepped next, over all iterations
        self._places = {region.parameter: (unit, region) for unit in self.units for region in unit.regions}
        self._hooks = []
        with torch.no_grad():
            self._write_initial_values(initial)
        for index, unit in enumerate(self.units):
            self._hooks.append(unit.optimizer.register_step_pre_hook(partial(self._before, index)))
            self._hooks.append(unit.optimizer.register_step_post_hook(partial(self._after, index)))
        self._read_ahead()

    # Once.

    def _write_initial_values(self, initial) -> None:
        for index, unit in enumerate(self.units):
            slot = index % len(self._slots)
            self._wait(self._moves[slot])
            unit.adopt(self._slots[slot], initial)
            self._write(index, slot)

    # Every step.

    def gradients_ready(self) -> None:
        """The gradients of all units are what this iteration steps with, once the current stream has done its work."""
        self._known, self._computed = self._next + len(self.units), self._device.mark()
        self._copy_gradients()

    def _copy_gradients(self) -> None:
        """Begin to copy the gradients of the next units, as far as there are slots, into them."""
        last = min(self._known, self._next + len(self._slots))
        for number in range(self._next, last if self._gradient_slots else 0):
            if number not in self._copies:
                copy = partial(self._copy_gradient, number)
                self._copies[number] = self._device.on_stream(copy, self._stream, self._computed)

    @torch.no_grad()
    def _copy_gradient(self, number: int) -> None:
        start, slot = 0, self._gradient_slots[number % len(self._slots)]
        for region in self.units[number % len(self.units)].regions:
            parameter = region.parameter
            if parameter in self._gradients and parameter not in self._in_place:
                gradient, own = self._gradients[parameter](), region.view(slot, 0, start)
                if gradient is not None:
                    own.copy_(gradient.view(region.shape), non_blocking=True)
                parameter.grad = None if gradient is None else own
                start += region.tensor_bytes

    def _before(self, index: int, *_) -> None:
        """The step of unit ``index`` begins."""
        assert index == self._next % len(self.units), "units are stepped in their order"
        self._read_ahead()
        self._reads.pop(self._next).wait()
        self.units[index].point_at(self._slots[self._next % len(self._slots)])
        for region in self.units[index].regions:
            if region.parameter in self._in_place:
                gradient = self._gradients[region.parameter]()
                region.parameter.grad = None if gradient is None else gradient.view(region.shape)
        self._device.synchronize(self._copies.pop(self._next, None))

    def _after(self, index: int, *_) -> None:
        """The step of unit ``index`` has ended."""
        slot, unit = self._next % len(self._slots), self.units[index]
        self._copied[slot] = self._device.mark()  # the optimizer has queued copies of its new parameters
        if not all(region.names for region in unit.regions):
            with torch.no_grad():
                unit.adopt(self._slots[slot])  # the optimizer has made its moments in this step
        for region in unit.regions if self._gradients else ():
            region.parameter.grad = None
        self._write(index, slot)
        self._next += 1
        self._read_ahead()
        self._copy_gradients()

    def _read_ahead(self) -> None:
        """Begin to read the next units into the slots that are free or being written."""
        # A unit is read again only after its step of this iteration has ended.
        for number in range(self._next, self._next + min(len(self._slots) - 1, len(self.units))):
            if number not in self._reads:
                self._reads[number] = self._read(number % len(self.units), number % len(self._slots))

    def _read(self, index: int, slot: int) -> Transfer:
        unit, before, copied = self.units[index], (self._moves[slot], self._writes[index]), self._copied[slot]
        memory = self._memory[slot * self.slot_bytes : slot * self.slot_bytes + unit.bytes]

        def read(transfer: Transfer):
            for write in before:
                self._wait(write)
            self._device.synchronize(copied)
            begin = perf_counter_ns()
            self.file.start(memory, unit.start, f"states {index}", transfer, self._recorded("states read", begin))
            return LATER

        return self._worker.submit(read)

    def _write(self, index: int, slot: int) -> None:
        unit, transfer = self.units[index], Transfer()
        unit.let_go()
        memory = self._memory[slot * self.slot_bytes : slot * self.slot_bytes + unit.bytes]
        self._moves[slot] = self._writes[index] = transfer
        recorded = self._recorded("states write", perf_counter_ns())
        self.file.start(memory, unit.start, f"states {index}", transfer, recorded, write=True)

    def _recorded(self, name: str, begin: int):
        recorder = self.recorder
        return None if recorder is None else lambda: recorder.add("nvme", name, begin, perf_counter_ns())

    @staticmethod
    def _wait(transfer: Transfer | None) -> None:
        if transfer is not None:
            transfer.wait()

    # For checkpoints.

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` and its moments rest on the drive."""
        return parameter in self._places

    def read_tensors(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """``parameter`` (as "param") and its moments by name, in memory that the system may take back. They hold until
        the next step; changing them changes nothing on the drive. Raises DriveError."""
        unit, region = self._places[parameter]
        self._wait(self._writes[self.units.index(unit)])
        size = state_layout.region_bytes(parameter.numel(), self.moments)
        memory = self.file.map(unit.start + region.offset, size, "states of a checkpoint")
        return {
            name: view(memory, index * region.tensor_bytes, region.shape, parameter.dtype)
            for index, name in enumerate(("param", *region.names))
        }

    def close(self) -> None:
        """Wait for what is on its way and give up the slots. The file can still be read, for a checkpoint after
        training; it is gone with this object."""
        for hook in self._hooks:
            hook.remove()
        for transfer in (*self._reads.values(), *self._writes):
            self._wait(transfer)
        self._worker.close()
        self.file.end_transfers()
        self._device.unpin(self._pinned)
        del self._pinned, self._slots, self._gradient_slots, self._memory, self._map


def _is_moment(value, parameter: torch.Tensor) -> bool:
    # Megatron's host optimizer lists the parameter itself among its states.
    return isinstance(value, torch.Tensor) and value is not parameter and value.shape == parameter.shape
