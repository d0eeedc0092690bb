"""The base of every route with a stream of its own."""

import torch

from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.streams import Arrival


class StreamRoute:
    """Base of routes that queue transfers on a stream; one instance per rank.

    Args:
        name: name of the stream.
        device: see :mod:`megatron_ext.runtime.device`.
        issuer: None if every transfer is issued at once.
    """

    def __init__(self, name: str, device, issuer: Issuer | None = None):
        self.device, self.stream, self._issuer = device, device.stream(name), issuer
        self._arrivals: dict[int, Arrival] = {}

    def arrival(self, index: int) -> Arrival:
        """The arrival of the group ``index``. From now on, the group's memory belongs to the transfer."""
        found = self._arrivals.get(index)
        if found is None:
            found = self._arrivals[index] = Arrival(self.device, self._issuer)
        return found.begin()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, arrival: Arrival, name: str = "") -> Arrival:
        """Issue a copy after the work given to the stream; ``arrival`` is its end. ``name``: shown in traces."""
        self.stream.wait(arrival.taken)
        self.stream.copy(destination, source, name)
        return arrival.end(self.stream)

    def drop(self) -> None:
        """Empty the staging slots, if the route has any."""

    def close(self) -> None:
        self.stream.close()
