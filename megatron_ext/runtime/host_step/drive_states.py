"""Optimizer states that rest on a drive and pass through a fixed number of slots in host memory.

[Note: A step through slots]
The states of a unit (its parameters, fp32, and their moments) lie in one piece of a file. Before a unit is stepped, its
piece is read into a slot, and its tensors are made views of the slot. After the step the slot is written back.
Meanwhile the next units are read into the other slots. At the end of an iteration these are the units still to be
stepped; before that, the units follow the order of the last iteration. One slot is kept free for a unit that comes out
of order. Each slot has a room, through which the gradients of its unit arrive and the parameters leave (room.py). The
arithmetic is the optimizer's own on the same values, so training is bitwise the same as with states in memory.

The issuing thread gives slots to units and takes them back. A thread may step, read and write.

Units that may be stepped before it is known whether the step counts (see early.py) have two places in the file. A step
reads the valid place and writes the other. The other place becomes the valid one at once, or, after an early step, when
that step is validated. The valid place is never overwritten before.

Between its steps, a unit's tensors are views of a single NaN: they keep their shapes and take no memory, and code that
computes with them by mistake gets NaN.
Source: ZeRO-Infinity (arXiv 2104.07857), section 5.2.2, which pipelines the optimizer's reads, step and writes.
"""

from collections.abc import Iterable
from time import perf_counter_ns

import torch

from megatron_ext.runtime import drive
from megatron_ext.runtime.drive_tensors import view
from megatron_ext.runtime.host_step.drive_slots import DriveSlots
from megatron_ext.runtime.host_step.flat_adamw import MOMENTS, FlatAdamW
from megatron_ext.runtime.host_step.room import OwnRooms, Room, StepStreams
from megatron_ext.runtime.host_step.state_regions import Regions
from megatron_ext.runtime.host_step.unit import HostUnit, Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.worker import Transfer, on_worker
from megatron_ext.workload import state_layout
from megatron_ext.workload.drive_reads import DriveReads


class DriveUnit(HostUnit):
    """A unit of :class:`DriveStates`.

    Attributes:
        slot, read: the slot that the unit has been given and the read into it, or None.
        written: the last write of its piece, or None.
        before: its step counts from before an early step that is not validated; None: there is no such step.
    """

    def __init__(self, states: "DriveStates", group: int, optimizer: FlatAdamW, pieces: list[Piece]):
        if states.rooms is None:
            super().__init__(group, optimizer, pieces, states, state_layout.LINE_BYTES)
        else:
            super().__init__(group, optimizer, pieces, states.rooms, later=True)
        self.regions = Regions(optimizer)
        self.slot: int | None = None
        self.read: Transfer | None = None
        self.written: Transfer | None = None
        self.before: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.fetched = False  # whether its tensors are views of the slot
        self._states = states

    def _before_step(self) -> None:
        begin = perf_counter_ns()
        self._states.fetch(self)
        self.read_ns = perf_counter_ns() - begin
        super()._before_step()

    def _after_step(self) -> None:
        self._states.put_back(self)
        super()._after_step()
        if self._states.rooms is not None:
            self._states.free(self)
        if self.before is None:
            self._states.count(self)

    def _let_go(self) -> None:
        self.regions.let_go()

    def give_up(self) -> None:
        super().give_up()
        self._states.read_ahead()

    def write_shards(self) -> None:
        """For an iteration that is skipped: fetches the unit first."""
        self._states.hold(self)
        self._states.fetch(self)
        super().write_shards()
        self._states.restored(self)

    def rollback_bytes(self) -> int:
        return 0

    def step_early(self, memory: torch.Tensor) -> None:
        self.before = [(count, count.clone()) for count in self.regions.counts()]
        self._states.begun[self] = None
        self.optimizer.step()

    def keep(self) -> None:
        self.before = None
        self._states.count(self)

    def take_back(self) -> None:
        for count, before in self.before or ():
            count.copy_(before)
        self.before = None


class DriveStates:
    """Lets host optimizers step with parameters and moments that rest on a drive, see the note above.

    Args:
        directory: on the drive.
        slots: pieces that fit in host memory at once, at least 2; with 3 a read, a step and a write run at the same
            time.
        settings: how to read and write.
        link: the streams that the rooms use.
        early: units have two places, so that they may be stepped early.
        rooms: one room per unit, if updates are delayed; None: there is one room per slot.

    Attributes:
        begun: units that were stepped early in this iteration, in the order of their steps.
    """

    def __init__(
        self,
        directory,
        *,
        slots: int,
        settings: DriveReads,
        link: StepStreams,
        issuer: Issuer,
        early: bool = False,
        rooms: OwnRooms | None = None,
    ):
        assert slots >= 2
        self.rooms = rooms
        self._directory, self._number, self._settings = directory, slots, settings
        self._link, self._issuer, self._two_places = link, issuer, early
        self.units: list[DriveUnit] = []
        self._rooms: list[Room] = []
        self._coming: dict[DriveUnit, None] = {}  # units to read ahead, in this order
        self.begun: dict[DriveUnit, None] = {}
        self._counted: set[DriveUnit] = set()  # units whose step in this iteration counts

    def open(self, initial: dict[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Write the states of all units to the drive; call it when all units have been added to :attr:`units`.

        Args:
            initial: parameters that have no values yet, and tensors with their values.

        Raises:
            InputError: the drive cannot hold the states.
        """
        start, size = 0, max(unit.regions.bytes for unit in self.units)
        self.bytes = total = sum(unit.regions.bytes for unit in self.units)
        for unit in self.units:
            unit.regions.place, unit.regions.other = start, start + total if self._two_places else start
            start += unit.regions.bytes
        self.file = drive.open_own(self._directory, 2 * total if self._two_places else total, self._settings)
        self._slots = DriveSlots(self.file, self._number, size, self._link.recorder)
        self.slots_bytes = self._slots.bytes
        if self.rooms is None:
            room_bytes = state_layout.gradient_slot_bytes(size, len(MOMENTS))
            memory = self._link.device.host_tensor(self._number * room_bytes, torch.uint8)
            self._rooms = [Room(self._link, own) for own in memory.split(room_bytes)]
            self.slots_bytes += len(memory)
        self._places = {one.parameter: (unit, one) for unit in self.units for one in unit.regions.regions}
        self._order = list(self.units)  # the order of the last iteration
        for unit in self.units:
            slot = self._slots.free.popleft()
            self._slots.wait_for_write(slot)
            with torch.no_grad():
                unit.regions.adopt(self._slots.pieces[slot], initial)
            self._write(unit, slot)
            unit.regions.let_go()
            self._slots.free.append(slot)
            unit.regions.swap()
        self._begin_iteration()

    # Slots and rooms, on the issuing thread.

    def has_room(self, unit: DriveUnit) -> bool:
        return unit.slot is not None or bool(self._slots.free)

    def take(self, unit: DriveUnit) -> Room:
        """The room that belongs to the slot of ``unit``."""
        return self._rooms[self.hold(unit)]

    def free(self, unit: DriveUnit) -> None:
        assert unit.slot is not None
        if not unit.fetched:  # it was not stepped: its read may still be running
            if self._slots.free:
                return
            self._wait(unit.read)
        self._slots.free.append(unit.slot)
        unit.slot, unit.read, unit.fetched = None, None, False

    def hold(self, unit: DriveUnit) -> int:
        """The slot of ``unit``. If it has none, give it one and begin the read into it."""
        self._coming.pop(unit, None)
        if unit.slot is None:
            unit.slot, regions = self._slots.free.popleft(), unit.regions
            unit.read = self._slots.read(unit.slot, regions.place, regions.bytes, self._name(unit), unit.written)
        return unit.slot

    def expect(self, units: Iterable[DriveUnit]) -> None:
        """``units`` are stepped next, in this order."""
        self._coming = dict.fromkeys(unit for unit in units if unit.slot is None)
        self.read_ahead()

    def read_ahead(self) -> None:
        """Begin to read the units that come next, but leave one slot free."""
        while self._coming and len(self._slots.free) > 1:
            self.hold(next(iter(self._coming)))

    # Around a step, on the thread that steps.

    def fetch(self, unit: DriveUnit) -> None:
        """Make a unit's tensors views of its slot, once the slot has been read."""
        if unit.fetched:
            return
        if self.rooms is not None:
            self.hold(unit)
        assert unit.slot is not None
        self._wait(unit.read)
        unit.fetched = True
        unit.regions.point_at(self._slots.pieces[unit.slot])

    def put_back(self, unit: DriveUnit) -> None:
        """The step of ``unit`` has ended: begin to write its piece."""
        assert unit.slot is not None
        self._write(unit, unit.slot)

    def _write(self, unit: DriveUnit, slot: int) -> None:
        unit.written = self._slots.write(slot, unit.regions.other, unit.regions.bytes, self._name(unit))

    def _name(self, unit: DriveUnit) -> str:
        return f"states {self.units.index(unit)}"

    def _wait(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            transfer.wait() if on_worker() else self._issuer.join(transfer)

    # Iterations.

    def restored(self, unit: DriveUnit) -> None:
        """The shards again have the values of the unit's parameters, in an iteration that is skipped."""
        unit.regions.let_go()
        self.free(unit)
        if all(one.before is None for one in self.units):
            self._begin_iteration()
        self.read_ahead()

    def count(self, unit: DriveUnit) -> None:
        """The step of ``unit`` counts."""
        unit.regions.swap()
        self._counted.add(unit)
        if len(self._counted) == len(self.units):
            self._begin_iteration()
        self.read_ahead()

    def _begin_iteration(self) -> None:
        """All units are in the state in which the next iteration needs them."""
        self._counted.clear()
        self._order = [*dict.fromkeys((*self.begun, *self._order))]
        self.begun.clear()
        self.expect(unit for unit in self._order if unit.before is None)

    # For checkpoints.

    def unit_of(self, parameter: torch.Tensor) -> DriveUnit | None:
        """The unit of ``parameter``; None if the parameter does not rest on the drive."""
        unit, _ = self._places.get(parameter, (None, None))
        return unit

    def read_tensors(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """``parameter`` (as "param") and its moments by name, in memory that the system may reclaim. They are valid
        until the next step; changing them changes nothing on the drive. Raises DriveError."""
        unit, region = self._places[parameter]
        assert unit.before is None
        self._wait(unit.written)
        size = state_layout.region_bytes(parameter.numel(), len(MOMENTS))
        memory = self.file.map(unit.regions.place + region.offset, size, "states of a checkpoint")
        return {
            name: view(memory, index * region.tensor_bytes, region.shape, parameter.dtype)
            for index, name in enumerate(("param", *MOMENTS))
        }

    def close(self) -> None:
        """Wait for reads and writes in flight and free the slots. The file can still be read, for a checkpoint after
        training; it is deleted with this object."""
        for unit in self.units:
            unit.close()
        self._slots.close()
        del self._slots
