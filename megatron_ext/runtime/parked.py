"""Parameters whose values are kept in host memory while they are not needed on the device."""

from collections.abc import Iterable
from math import nan

import torch


class Parked:
    """One instance per rank. ``kind``: ``cuda`` or ``cpu``, the kind of the device whose memory is saved.

    A parked parameter keeps its shape and device; a single NaN stands in for its values.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self._values: dict[torch.Tensor, torch.Tensor] = {}

    def park(self, parameters: Iterable[torch.Tensor]) -> None:
        """Move the values of ``parameters`` to host memory. A parameter that is part of a larger storage keeps its
        bytes, and so does one on another device."""
        for parameter in parameters:
            storage = parameter.untyped_storage()
            alone = parameter not in self._values and storage.nbytes() == parameter.nbytes
            if alone and parameter.device.type == self._kind:
                self._values[parameter] = parameter.detach().to("cpu", copy=True)
                parameter.data = torch.full((), nan, dtype=parameter.dtype, device=parameter.device).expand(
                    parameter.shape
                )

    def put(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values of ``parameter``, wherever they are."""
        with torch.no_grad():
            self._values.get(parameter, parameter.data).copy_(values)

    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        """Remove ``parameter`` and return its values, which are in host memory if it was parked."""
        return self._values.pop(parameter, parameter.data)
