"""Parameters of a host optimizer that rest on a drive with their moments: their layout in the file and in a slot."""

from math import nan

import torch

from megatron_ext.runtime.host_step.flat_adamw import MOMENTS, FlatAdamW
from megatron_ext.workload import state_layout


class Region:
    """Where one parameter and its moments lie in a unit's piece.

    Attributes:
        parameter: the host optimizer's, fp32, any shape.
        offset: byte at which the region begins within the unit's piece, a multiple of the drive's block.
    """

    __slots__ = ("parameter", "offset", "shape", "tensor_bytes")

    def __init__(self, parameter: torch.Tensor, offset: int):
        self.parameter, self.offset, self.shape = parameter, offset, parameter.shape
        self.tensor_bytes = state_layout.tensor_bytes(parameter.numel())

    def view(self, slot: torch.Tensor, index: int) -> torch.Tensor:
        """Tensor ``index`` (0: the parameter) in ``slot``, 1D uint8."""
        start = self.offset + index * self.tensor_bytes
        flat = slot[start : start + self.parameter.numel() * self.parameter.element_size()]
        return flat.view(self.parameter.dtype).view(self.shape)


class Regions:
    """The regions of the parameters of a unit, which are read, stepped and written together.

    Attributes:
        place, other: byte of the file at which the unit's piece lies, and byte at which the next step writes it. They
            are the same if a step always counts.
    """

    def __init__(self, optimizer: FlatAdamW):
        self.optimizer, self.regions = optimizer, []
        offset = self.place = self.other = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype is torch.float32
                self.regions.append(Region(parameter, offset))
                offset += state_layout.region_bytes(parameter.numel(), len(MOMENTS))
        self.bytes = offset

    def adopt(self, slot: torch.Tensor, initial: dict[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Move the parameters and their states, which are created if there are none, into ``slot``. ``initial``:
        parameters that have no values yet, and tensors with their values."""
        for region in self.regions:
            self.optimizer.state_of(region.parameter)
            for index, tensor in enumerate(self._tensors(region)):
                tensor.data = region.view(slot, index).copy_((initial or {}).get(tensor, tensor).detach())

    def point_at(self, slot: torch.Tensor) -> None:
        """Make the tensors views of ``slot``."""
        for region in self.regions:
            for index, tensor in enumerate(self._tensors(region)):
                tensor.data = region.view(slot, index)

    def swap(self) -> None:
        """Make the piece that was written last the valid one."""
        self.place, self.other = self.other, self.place

    def counts(self) -> list[torch.Tensor]:
        """The states that stay in memory: the step count of each parameter."""
        return [self.optimizer.state[region.parameter]["step"] for region in self.regions]

    def let_go(self) -> None:
        """Make each tensor a view of a single NaN: it keeps its shape and takes no memory."""
        for region in self.regions:
            for tensor in self._tensors(region):
                tensor.data = torch.full((), nan, dtype=tensor.dtype).expand(region.shape)

    def _tensors(self, region: Region) -> list[torch.Tensor]:
        state = self.optimizer.state[region.parameter]
        return [region.parameter, *(state[name] for name in MOMENTS)]
