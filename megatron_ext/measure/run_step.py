"""The host's step of one group as a run makes it by a schedule with ``step_slots`` or ``rollback_bytes``. It uses the
run's own code: gradients in slots, adjacent tensors stepped as one, and copies during steps."""

import torch

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.timed_steps import TimedHostStep
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW, lay_out_parameters
from megatron_ext.runtime.host_step.room import Piece, SharedRooms, StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit
from megatron_ext.runtime.page_locked import large_tensor
from megatron_ext.schedule.host_slots import SLOTS, cast_part_bytes, planned_slot_bytes
from megatron_ext.workload.state_layout import LINE_BYTES, tensor_bytes


class RunStep(TimedHostStep):
    """The step of this rank's shard of a group of ``size_bytes`` of 16-bit parameters, which are cast on the host."""

    name = "host_step_joined"
    cast_on_device = False

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.units: list[HostUnit] = []
        self._link: StepStreams | None = None

    def step(self) -> None:
        self._after_norm.expect(self.units)
        for unit in self.units:
            unit.optimizer.step()
        self.fabric.device.settle()

    def build(self, size_bytes: int) -> None:
        """Make the tensors of the shard, and units of as many tensors as a slot holds."""
        self.close()
        device, place, sizes = self.fabric.device, self.fabric.torch_device, self.sizes(size_bytes)
        slot = planned_slot_bytes(tensor_bytes(max(sizes)), sum(map(tensor_bytes, sizes)))
        self._link = StepStreams(device, place, cast_part_bytes(slot) if self.cast_on_device else 0)
        rooms = SharedRooms(self._link, SLOTS, slot, self.cast_on_device)
        each = max(slot // tensor_bytes(max(sizes)), 1)
        for first in range(0, len(sizes), each):
            pieces = []
            for size in sizes[first : first + each]:
                gradient = torch.full((size,), 1e-3, device=place)
                shard = torch.ones(size, dtype=torch.bfloat16, device=place)
                pieces.append(Piece(torch.ones(size), lambda own=gradient: own, shard))
            optimizer = FlatAdamW([piece.parameter for piece in pieces], lr=1e-4, fused=True)
            lay_out_parameters(optimizer, device.host_tensor if self.cast_on_device else large_tensor)
            self.units.append(HostUnit(first, optimizer, pieces, rooms, LINE_BYTES))
        self._after_norm = AfterNorm(self._link)

    def close(self) -> None:
        for unit in self.units:
            unit.close()
            vars(unit).clear()  # unit and room refer to each other: both would stay until Python collects cycles
        if self._link is not None:
            self._link.close()
        self.units, self._link, self._size = [], None, None


class RunStepCastOnDevice(RunStep):
    """The same step, with the new parameters copied in float32 and cast on the device."""

    name = "host_step_cast_on_device"
    cast_on_device = True
