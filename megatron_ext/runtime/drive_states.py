"""Optimizer states that rest on a drive and pass through a fixed number of slots in host memory.

[Note: A step through slots]
The parameters of a host optimizer are divided into units, each stepped by an optimizer of its own. What a unit
keeps (its parameters, fp32, and their moments) lies in one piece of a file. Before a unit is stepped its piece is
read into a slot, and its tensors are pointed there. After the step the slot is written back. Meanwhile the next
units are read into the other slots: at the end of an iteration those that are left, before that in the order of the
last iteration. One slot is kept for a unit that comes out of order. The arithmetic is the optimizer's own on the same
values, so training is the same to the last bit as with states in memory.

Gradients come by slots as well: each slot has room for the gradient of a unit, which is copied there while the unit
before is stepped. A gradient that is fp32 in host memory already is used where it is.

Units that are stepped before it is known whether the step counts (see early_steps.py) have two places in the file. A
step reads the one that counts and writes the other, which counts from then on, or when the early step is validated.
What counts is never overwritten before.

Between its steps a unit's tensors point at one NaN: they keep their shapes, take no memory, and whoever computes
with them by mistake sees it.
Source: ZeRO-Infinity (arXiv 2104.07857), section 5.2.2, which pipelines the optimizer's reads, step and writes.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from megatron_ext.runtime import drive
from megatron_ext.runtime.drive_slots import DriveSlots
from megatron_ext.runtime.drive_tensors import view
from megatron_ext.runtime.state_units import Unit
from megatron_ext.runtime.worker import Transfer
from megatron_ext.workload import state_layout
from megatron_ext.workload.drive_reads import DriveReads


class DriveStates:
    """Lets host optimizers step with their parameters and moments on a drive, see the note above.

    Args:
        optimizers: one a unit, each stepped once an iteration. Their parameters are fp32 host tensors.
        directory: on the drive.
        moments: tensors of a parameter's shape that the optimizer keeps for it: 2 for Adam.
        slots: pieces in host memory at once, at least 2; with 3 a read, a step and a write run at the same time.
        settings: how to read and write.
        device: pins the slots.
        initial: tensors with the values of parameters that have none yet.
        gradients: by parameter, calls that return its gradient, of any float dtype, or None; those that ``in_place``
            holds are fp32 in host memory. Left out: somebody else sets ``grad`` before a step.
        early: units have two places, so that :meth:`step_early` may be called; nothing is ``in_place``.

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
        early: bool = False,
    ):
        assert optimizers and slots >= 2 and not (early and in_place)
        self.units: list[Unit] = []
        start = 0
        for optimizer in optimizers:
            self.units.append(Unit(optimizer, moments, start))
            start += self.units[-1].bytes
        for unit in self.units if early else ():
            unit.other += start
        self.bytes, self.moments = start, moments
        self.slot_bytes = max(unit.bytes for unit in self.units)
        self._gradients, self._in_place = gradients or {}, in_place
        copied = self._gradients.keys() - in_place
        room = state_layout.gradient_slot_bytes(self.slot_bytes, moments) if copied else 0
        assert all(unit.gradient_bytes(copied.__contains__) <= room for unit in self.units)
        self.file = drive.open_own(directory, 2 * start if early else start, settings)
        self._slots = DriveSlots(self.file, slots, self.slot_bytes, room, device, recorder)
        self.slots_bytes = self._slots.bytes
        self._device, self._stream = device, device.copy_stream() if room else None
        self._copies: dict[int, object] = {}  # of gradients into slots, by unit
        self._computed = None
        self._left: set[int] = set()  # units whose gradients are ready, and that are stepped on them
        self._writes: list[Transfer | None] = [None] * len(self.units)
        self._held: dict[int, tuple[int, Transfer]] = {}  # by unit that is not stepped yet, its slot and the read
        self._slot = -1  # of the unit that is stepped
        self._coming: dict[int, None] = {}  # units that are read ahead, in this order
        self._order = list(range(len(self.units)))  # of the last iteration
        self._begun: dict[int, None] = {}  # units that were stepped early in this iteration
        self._early: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # those not validated; step counts before
        self._counted: set[int] = set()  # units whose step of this iteration counts
        self._places = {region.parameter: (index, region) for index, u in enumerate(self.units) for region in u.regions}
        with torch.no_grad():
            self._write_initial_values(initial)
        self._hooks = [
            unit.optimizer.register_step_pre_hook(partial(self._before, i)) for i, unit in enumerate(self.units)
        ]
        self._hooks += [
            unit.optimizer.register_step_post_hook(partial(self._after, i)) for i, unit in enumerate(self.units)
        ]
        self._begin_iteration()

    # Once.

    def _write_initial_values(self, initial) -> None:
        for index, unit in enumerate(self.units):
            self._slot = self._slots.take()
            self._slots.wait_for_write(self._slot)
            unit.adopt(self._slots.pieces[self._slot], initial)
            self._write(index)
            self._leave(index)
            self._swap(index)

    # Every step.

    def gradients_ready(self, optimizers: Iterable[torch.optim.Optimizer] | None = None) -> None:
        """``optimizers`` (left out: all) are stepped next, in this order. Their gradients are what the step needs, once
        the current stream has done its work."""
        numbers = {unit.optimizer: index for index, unit in enumerate(self.units)}
        left = [*numbers.values()] if optimizers is None else [numbers[one] for one in optimizers]
        if left:
            self._left, self._computed = set(left), self._device.mark()
            for index, (slot, _) in self._held.items():
                self._copy_if_ready(index, slot)
            self._expect(left)

    def _copy_if_ready(self, index: int, slot: int) -> None:
        if index in self._left and self._slots.gradients:
            copy = partial(self._copy_gradient, index, slot, lambda parameter: self._gradients[parameter]())
            self._copies[index] = self._device.on_stream(copy, self._stream, self._computed)

    @torch.no_grad()
    def _copy_gradient(self, index: int, slot: int, find: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        start = 0
        for region in self.units[index].regions:
            parameter = region.parameter
            if parameter in self._gradients and parameter not in self._in_place:
                gradient, own = find(parameter), region.view(self._slots.gradients[slot], 0, start)
                if gradient is not None:
                    own.copy_(gradient.view(region.shape), non_blocking=True)
                parameter.grad = None if gradient is None else own
                start += region.tensor_bytes

    def _before(self, index: int, *_) -> None:
        """The step of unit ``index`` begins."""
        self._fetch(index)
        self._left.discard(index)
        for region in self.units[index].regions:
            if region.parameter in self._in_place:
                gradient = self._gradients[region.parameter]()
                region.parameter.grad = None if gradient is None else gradient.view(region.shape)
        self._device.synchronize(self._copies.pop(index, None))

    def _after(self, index: int, *_) -> None:
        """The step of unit ``index`` has ended."""
        unit = self.units[index]
        if not all(region.names for region in unit.regions):
            with torch.no_grad():
                unit.adopt(self._slots.pieces[self._slot])  # the optimizer has made its moments in this step
        for region in unit.regions if self._gradients else ():
            region.parameter.grad = None
        self._write(index)
        self._leave(index)
        if index not in self._early:
            self._count(index)
        self._read_ahead()

    # Steps that may not count.

    def take_gradients(self, index: int, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Copy the gradients, by parameter, that :meth:`step_early` steps on next; queued on the current stream."""
        self._copy_gradient(index, self._hold(index), gradients.__getitem__)

    def step_early(self, index: int) -> None:
        """Step a unit. :meth:`keep` or :meth:`take_back` follows, before the iteration's other units are stepped."""
        self._early[index] = [(count, count.clone()) for count in self.units[index].counts()]
        self._begun[index] = None
        self.units[index].optimizer.step()

    def keep(self, index: int) -> None:
        """The early step counts."""
        del self._early[index]
        self._count(index)
        self._read_ahead()

    def take_back(self, index: int) -> None:
        """The early step does not count: the unit is stepped again, or the iteration is skipped."""
        for count, before in self._early.pop(index):
            count.copy_(before)

    def restore(self, index: int, use: Callable[[], None]) -> None:
        """Call ``use`` while the unit's tensors are there, in an iteration that is skipped: what it gives the current
        stream may read them."""
        self._fetch(index)
        use()
        self._leave(index)
        if not self._early:
            self._begin_iteration()
        self._read_ahead()

    # Slots.

    def _count(self, index: int) -> None:
        """The step of unit ``index`` counts."""
        self._swap(index)
        self._counted.add(index)
        if len(self._counted) == len(self.units):
            self._begin_iteration()

    def _swap(self, index: int) -> None:
        unit = self.units[index]
        unit.place, unit.other = unit.other, unit.place

    def _begin_iteration(self) -> None:
        """All units are as the next iteration finds them."""
        self._counted.clear()
        self._order = [*dict.fromkeys((*self._begun, *self._order))]
        self._begun.clear()
        self._expect(index for index in self._order if index not in self._early)

    def _expect(self, units: Iterable[int]) -> None:
        self._coming = dict.fromkeys(index for index in units if index not in self._held)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Begin to read the units that come next, but leave one slot free."""
        while self._coming and len(self._slots.free) > 1:
            self._hold(next(iter(self._coming)))

    def _hold(self, index: int) -> int:
        """The slot of a unit, into which it is read or being read from now on."""
        self._coming.pop(index, None)
        if index not in self._held:
            unit, slot = self.units[index], self._slots.take()
            read = self._slots.read(slot, unit.place, unit.bytes, f"states {index}", self._writes[index])
            self._held[index] = slot, read
            self._copy_if_ready(index, slot)
        return self._held[index][0]

    def _fetch(self, index: int) -> None:
        """Point a unit at its slot, once it has been read."""
        self._hold(index)
        slot, read = self._held[index]
        read.wait()  # if it has failed it fails again
        del self._held[index]
        self._slot = slot
        self.units[index].point_at(self._slots.pieces[slot])

    def _leave(self, index: int) -> None:
        """Take a unit out of its slot. What the current stream has been given may still read it there."""
        self.units[index].let_go()
        self._slots.leave(self._slot)

    def _write(self, index: int) -> None:
        unit = self.units[index]
        self._writes[index] = self._slots.write(self._slot, unit.other, unit.bytes, f"states {index}")

    @staticmethod
    def _wait(transfer: Transfer | None) -> None:
        if transfer is not None:
            transfer.wait()

    # For checkpoints.

    def unit_of(self, parameter: torch.Tensor) -> int | None:
        """Number of the unit of ``parameter``; None where it does not rest on the drive."""
        index, _ = self._places.get(parameter, (None, None))
        return index

    def read_tensors(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """``parameter`` (as "param") and its moments by name, in memory that the system may take back. They hold until
        the next step; changing them changes nothing on the drive. Raises DriveError."""
        index, region = self._places[parameter]
        assert index not in self._early
        self._wait(self._writes[index])
        size = state_layout.region_bytes(parameter.numel(), self.moments)
        memory = self.file.map(self.units[index].place + region.offset, size, "states of a checkpoint")
        return {
            name: view(memory, index * region.tensor_bytes, region.shape, parameter.dtype)
            for index, name in enumerate(("param", *region.names))
        }

    def close(self) -> None:
        """Wait for what is on its way and give up the slots. The file can still be read, for a checkpoint after
        training; it is gone with this object."""
        for hook in self._hooks:
            hook.remove()
        for transfer in (*(read for _, read in self._held.values()), *self._writes):
            self._wait(transfer)
        self._slots.close()
        del self._slots
