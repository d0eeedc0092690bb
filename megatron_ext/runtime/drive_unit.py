"""A unit whose states rest on a drive, stepped beside the backward.

It needs no copy of its states in memory: the step reads one place on the drive and writes another, see drive_states.py.
Where the step does not stand, the first one counts as before.
"""

from collections.abc import Callable

import torch

from megatron_ext.runtime.drive_states import DriveStates
from megatron_ext.runtime.early_steps import StepUnit


class DriveUnit(StepUnit):
    """A unit of :class:`DriveStates`.

    Args:
        index: of the unit in ``states``.
        others: of :class:`StepUnit`.
    """

    def __init__(
        self,
        group: int,
        states: DriveStates,
        index: int,
        gradients: dict[torch.Tensor, torch.Tensor],
        shards: dict[torch.Tensor, torch.Tensor],
        inverse_scale: Callable[[], float | None],
    ):
        super().__init__(group, states.units[index].optimizer, gradients, shards, inverse_scale)
        self.states, self.index = states, index

    ahead = False  # its slots are those of states, which one thread takes and leaves

    def bytes(self) -> int:
        return 0

    def take_gradients(self) -> None:
        self.states.take_gradients(self.index, self.gradients)

    def step(self, memory: torch.Tensor) -> None:
        self.unscale()
        self.states.step_early(self.index)

    def keep(self) -> None:
        self.states.keep(self.index)

    def take_back(self, device) -> None:
        self.states.take_back(self.index)

    def restore_device(self) -> None:
        self.states.restore(self.index, super().restore_device)
