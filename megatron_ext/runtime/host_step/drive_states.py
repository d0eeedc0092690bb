"""Optimizer states that rest on a drive and pass through a fixed number of slots in host memory.

[Note: A step through slots]
What a unit keeps (its parameters, fp32, and their moments) lies in one piece of a file. Before a unit is stepped its
piece is read into a slot, and its tensors are pointed there. After the step the slot is written back. Meanwhile the
next units are read into the other slots: at the end of an iteration those that are left, before that in the order of
the last iteration. One slot is kept for a unit that comes out of order. Beside each slot is a room, through which the
gradients of its unit arrive and the parameters leave (room.py). The arithmetic is the optimizer's own on the same
values, so training is the same to the last bit as with states in memory.

The issuing thread gives slots to units and takes them back. A thread may step, read and write.

Units that are stepped before it is known whether the step counts (see early.py) have two places in the file. A
step reads the one that counts and writes the other, which counts from then on, or when the early step is validated.
What counts is never overwritten before.

Between its steps a unit's tensors point at one NaN: they keep their shapes, take no memory, and whoever computes
with them by mistake sees it.
Source: ZeRO-Infinity (arXiv 2104.07857), section 5.2.2, which pipelines the optimizer's reads, step and writes.
"""

from collections.abc import Iterable

import torch

from megatron_ext.runtime import drive
from megatron_ext.runtime.drive_tensors import view
from megatron_ext.runtime.host_step.drive_slots import DriveSlots
from megatron_ext.runtime.host_step.room import Link, Room
from megatron_ext.runtime.host_step.state_regions import Regions
from megatron_ext.runtime.host_step.unit import HostUnit, Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.worker import Transfer, on_worker
from megatron_ext.workload import state_layout
from megatron_ext.workload.drive_reads import DriveReads


class DriveUnit(HostUnit):
    """A unit of :class:`DriveStates`."""

    def __init__(self, group: int, optimizer, pieces: list[Piece], states: "DriveStates"):
        super().__init__(group, optimizer, pieces, states if states.room else None, state_layout.LINE_BYTES)
        self.regions = Regions(optimizer, states.moments, 0)
        self._states = states

    def _before_step(self) -> None:
        self._states.fetch(self)
        super()._before_step()

    def _after_step(self) -> None:
        self._states.put_back(self)
        super()._after_step()
        self._states.stepped(self)

    def _let_go(self) -> None:
        self.regions.let_go()

    def give_up(self) -> None:
        super().give_up()
        self._states.read_ahead()

    def write_shards(self) -> None:
        self._states.restore(self)

    def rollback_bytes(self) -> int:
        return 0

    def step_early(self, memory: torch.Tensor) -> None:
        self._states.step_early(self)

    def keep(self) -> None:
        self._states.keep(self)

    def take_back(self) -> None:
        self._states.take_back(self)


class DriveStates:
    """Lets host optimizers step with their parameters and moments on a drive, see the note above.

    Args:
        directory: on the drive.
        moments: tensors of a parameter's shape that the optimizer keeps for it: 2 for Adam.
        slots: pieces in host memory at once, at least 2; with 3 a read, a step and a write run at the same time.
        settings: how to read and write.
        link: of the rooms.
        early: units have two places, so that they may be stepped early.
        room: gradients and parameters pass through rooms; else units have none.
        recorder: where reads and writes are recorded, or None.
    """

    def __init__(
        self,
        directory,
        *,
        moments: int,
        slots: int,
        settings: DriveReads,
        link: Link,
        issuer: Issuer,
        early: bool = False,
        room: bool = True,
        recorder=None,
    ):
        assert slots >= 2
        self.room, self._recorder = room, recorder
        self.moments, self._directory, self._number, self._settings = moments, directory, slots, settings
        self._link, self._issuer, self._two_places = link, issuer, early
        self.units: list[DriveUnit] = []
        self._rooms: list[Room] = []
        self._held: dict[DriveUnit, tuple[int, Transfer]] = {}  # by unit, its slot and the read
        self._fetched: set[DriveUnit] = set()
        self._coming: dict[DriveUnit, None] = {}  # units that are read ahead, in this order
        self._begun: dict[DriveUnit, None] = {}  # units that were stepped early in this iteration
        self._early: dict[DriveUnit, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # not validated; counts before
        self._counted: set[DriveUnit] = set()  # units whose step of this iteration counts

    def open(self, initial: dict[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Write the states of all units to the drive; once they have been added to :attr:`units`.

        Args:
            initial: tensors with the values of parameters that have none yet.

        Raises:
            InputError: the drive cannot hold the states.
        """
        start, size = 0, max(unit.regions.bytes for unit in self.units)
        total = sum(unit.regions.bytes for unit in self.units)
        for unit in self.units:
            unit.regions.place, unit.regions.other = start, start + total if self._two_places else start
            start += unit.regions.bytes
        self.bytes = total
        self.file = drive.open_own(self._directory, 2 * total if self._two_places else total, self._settings)
        self._slots = DriveSlots(self.file, self._number, size, self._recorder)
        self.slots_bytes = self._slots.bytes
        if self.room:
            room_bytes = state_layout.gradient_slot_bytes(size, self.moments)
            memory = self._link.device.host_tensor(self._number * room_bytes, torch.uint8)
            self._rooms = [Room(self._link, own) for own in memory.split(room_bytes)]
            self.slots_bytes += len(memory)
        self._places = {one.parameter: (unit, one) for unit in self.units for one in unit.regions.regions}
        self._order = list(self.units)  # of the last iteration
        self._writes: dict[DriveUnit, Transfer] = {}
        for unit in self.units:
            slot = self._slots.take()
            self._slots.wait_for_write(slot)
            with torch.no_grad():
                unit.regions.adopt(self._slots.pieces[slot], initial)
            self._write(unit, slot)
            unit.regions.let_go()
            self._slots.leave(slot)
            self._swap(unit)
        self._begin_iteration()

    # Slots and rooms, on the issuing thread.

    def has_room(self, unit: HostUnit) -> bool:
        return unit in self._held or bool(self._slots.free)

    def take(self, unit: HostUnit) -> Room:
        """The room of the slot of ``unit``, into which it is read or being read from now on."""
        return self._rooms[self._hold(self._own(unit))]

    def free(self, unit: HostUnit) -> None:
        own = self._own(unit)
        if own not in self._fetched:  # it was not stepped, and is being read already
            if self._slots.free:
                return
            self._wait(self._held[own][1])
        self._fetched.discard(own)
        self._slots.leave(self._held.pop(own)[0])

    def _own(self, unit: HostUnit) -> DriveUnit:
        assert isinstance(unit, DriveUnit)
        return unit

    def _hold(self, unit: DriveUnit) -> int:
        self._coming.pop(unit, None)
        if unit not in self._held:
            slot, regions = self._slots.take(), unit.regions
            what = f"states {self.units.index(unit)}"
            read = self._slots.read(slot, regions.place, regions.bytes, what, self._writes.get(unit))
            self._held[unit] = slot, read
        return self._held[unit][0]

    def _expect(self, units: Iterable[DriveUnit]) -> None:
        self._coming = dict.fromkeys(unit for unit in units if unit not in self._held)
        self.read_ahead()

    def read_ahead(self) -> None:
        """Begin to read the units that come next, but leave one slot free."""
        while self._coming and len(self._slots.free) > 1:
            self._hold(next(iter(self._coming)))

    def expect(self, units: list[HostUnit]) -> None:
        """``units`` are stepped next, in this order."""
        self._expect(map(self._own, units))

    # Around a step, on the thread that steps.

    def fetch(self, unit: DriveUnit) -> None:
        """Point a unit at its slot, once it has been read."""
        if unit in self._fetched:
            return
        if not self.room:
            self._hold(unit)
        slot, read = self._held[unit]
        self._wait(read)
        self._fetched.add(unit)
        unit.regions.point_at(self._slots.pieces[slot])

    def put_back(self, unit: DriveUnit) -> None:
        """The step of ``unit`` has ended: begin to write it."""
        slot, _ = self._held[unit]
        if not all(region.names for region in unit.regions.regions):
            with torch.no_grad():
                unit.regions.adopt(self._slots.pieces[slot])  # the optimizer has made its moments in this step
        self._write(unit, slot)

    def _write(self, unit: DriveUnit, slot: int) -> None:
        what, regions = f"states {self.units.index(unit)}", unit.regions
        self._writes[unit] = self._slots.write(slot, regions.other, regions.bytes, what)

    def _wait(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            transfer.wait() if on_worker() else self._issuer.join(transfer)

    def stepped(self, unit: DriveUnit) -> None:
        """Everything behind the step is done."""
        if not self.room:
            self.free(unit)
        if unit not in self._early:
            self._count(unit)

    # Steps that may not count.

    def step_early(self, unit: DriveUnit) -> None:
        """Step a unit, on the thread. :meth:`keep` or :meth:`take_back` follows, before the iteration's other units are
        stepped."""
        self._early[unit] = [(count, count.clone()) for count in unit.regions.counts()]
        self._begun[unit] = None
        unit.optimizer.step()

    def keep(self, unit: DriveUnit) -> None:
        """The early step counts."""
        del self._early[unit]
        self._count(unit)

    def take_back(self, unit: DriveUnit) -> None:
        """The early step does not count: the unit is stepped again, or the iteration is skipped."""
        for count, before in self._early.pop(unit):
            count.copy_(before)

    def restore(self, unit: DriveUnit) -> None:
        """Give the shards the values of the unit's parameters, in an iteration that is skipped."""
        self._hold(unit)
        self.fetch(unit)
        HostUnit.write_shards(unit)
        unit.regions.let_go()
        self.free(unit)
        if not self._early:
            self._begin_iteration()
        self.read_ahead()

    def _count(self, unit: DriveUnit) -> None:
        """The step of ``unit`` counts."""
        self._swap(unit)
        self._counted.add(unit)
        if len(self._counted) == len(self.units):
            self._begin_iteration()
        self.read_ahead()

    def _swap(self, unit: DriveUnit) -> None:
        regions = unit.regions
        regions.place, regions.other = regions.other, regions.place

    def _begin_iteration(self) -> None:
        """All units are as the next iteration finds them."""
        self._counted.clear()
        self._order = [*dict.fromkeys((*self._begun, *self._order))]
        self._begun.clear()
        self._expect(unit for unit in self._order if unit not in self._early)

    # For checkpoints.

    def unit_of(self, parameter: torch.Tensor) -> DriveUnit | None:
        """The unit of ``parameter``; None where it does not rest on the drive."""
        unit, _ = self._places.get(parameter, (None, None))
        return unit

    def read_tensors(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """``parameter`` (as "param") and its moments by name, in memory that the system may take back. They hold until
        the next step; changing them changes nothing on the drive. Raises DriveError."""
        unit, region = self._places[parameter]
        assert unit not in self._early
        self._wait(self._writes.get(unit))
        size = state_layout.region_bytes(parameter.numel(), self.moments)
        memory = self.file.map(unit.regions.place + region.offset, size, "states of a checkpoint")
        return {
            name: view(memory, index * region.tensor_bytes, region.shape, parameter.dtype)
            for index, name in enumerate(("param", *region.names))
        }

    def close(self) -> None:
        """Wait for what is on its way and give up the slots. The file can still be read, for a checkpoint after
        training; it is gone with this object."""
        for unit in self.units:
            unit.close()
        self._slots.close()
        del self._slots
