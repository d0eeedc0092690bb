"""What every route with a stream of its own has."""

import torch

from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.streams import Arrival


class StreamRoute:
    """Base of routes that queue transfers on a stream; one instance a rank.

    Args:
        name: of the stream.
        device: see :mod:`megatron_ext.runtime.device`.
        issuer: None where every transfer is issued at once.
    """

    def __init__(self, name: str, device, issuer: Issuer | None = None):
        self.device, self.stream, self._issuer = device, device.stream(name), issuer
        self._arrivals: dict[int, Arrival] = {}

    def arrival(self, index: int) -> Arrival:
        """Of the group ``index``: its memory belongs to the transfer from now on."""
        found = self._arrivals.get(index)
        if found is None:
            found = self._arrivals[index] = Arrival(self.device, self._issuer)
        return found.begin()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, arrival: Arrival, name: str = "") -> Arrival:
        """Issue a copy behind what the stream has been given, whose end is ``arrival``. ``name``: in traces."""
        self.stream.wait(arrival.taken)
        self.stream.copy(destination, source, name)
        return arrival.end(self.stream)

    def drop(self) -> None:
        """Empty the staging slots, where the route has some."""

    def close(self) -> None:
        self.stream.close()
