"""Parameters whose values wait in host memory while nothing needs them on the device."""

from collections.abc import Iterable
from math import nan

import torch


class Parked:
    """Of one rank; ``kind``: of the device whose memory is spared, ``cuda`` or ``cpu``.

    A parked parameter keeps its shape and device; a single NaN stands in for its values.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self._values: dict[torch.Tensor, torch.Tensor] = {}

    def park(self, parameters: Iterable[torch.Tensor]) -> None:
        """Put the values of ``parameters`` into host memory. A parameter that is a part of something larger keeps its
        bytes, and so does one that lies elsewhere."""
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
        """The values of ``parameter``, in host memory where it is parked; it is forgotten then."""
        return self._values.pop(parameter, parameter.data)
