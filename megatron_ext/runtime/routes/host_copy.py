"""Route ``cpu``: copy of the whole group from the node's host copy, which is page-locked."""

from functools import partial

import torch

from megatron_ext.runtime.flags import DeviceFlag
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import COPY, HostPool
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.recorder import Recorder, log_of
from megatron_ext.runtime.streams import Arrival, Stream


class Copies:
    """Copies to the device, on a stream of their own; what every route from host memory shares.

    Args:
        device: see :mod:`megatron_ext.runtime.device`.
        issuer: None where every copy is issued at once.
    """

    def __init__(self, name: str, device, issuer: Issuer | None = None, recorder: Recorder | None = None):
        self.stream: Stream = device.stream(name)
        self.stream.log = log_of(recorder, "gather", "to_device", "cpu")
        self._device, self._issuer = device, issuer
        self._arrivals: dict[int, Arrival] = {}

    def arrival(self, index: int) -> Arrival:
        """Of the group ``index``: its memory belongs to the copy from now on."""
        found = self._arrivals.get(index)
        if found is None:
            found = self._arrivals[index] = Arrival(self._device, self._issuer)
        return found.begin()

    def copy(self, index: int, destination: torch.Tensor, source: torch.Tensor, arrival: Arrival) -> None:
        """Issue the copy of group ``index`` behind what the stream has been given."""
        self.stream.wait(arrival.taken)
        self.stream.copy(destination, source, f"unshard {index}")
        arrival.end(self.stream)

    def drop(self) -> None:
        """Empty the staging slots, where the route has some."""

    def close(self) -> None:
        self.stream.close()


class HostCopy(Copies):
    """The whole group at the clock's version; see :mod:`megatron_ext.runtime.host_pool` for who publishes it."""

    def __init__(self, pool: HostPool, device, issuer: Issuer, clock: Clock, recorder=None):
        super().__init__("cpu-route", device, issuer, recorder)
        self.pool, self.issuer, self.clock = pool, issuer, clock
        self._waited: dict[int, int] = {}  # version that the stream has waited for, by group
        issuer.checks.append(lambda: pool.check_peers(clock.version))

    def issue(self, group: Group) -> Arrival:
        version, arrival, pool = self.clock.version, self.arrival(group.index), self.pool
        if pool.by_thread(group):
            self.issuer.when(partial(pool.is_published, group, version), partial(self._copy, group, arrival))
            return arrival
        if self._waited.get(group.index) != version:
            self._waited[group.index] = version
            check = partial(pool.check_published, group, version)
            for flag in pool.flags[group.index, COPY]:
                assert isinstance(flag, DeviceFlag)
                self.stream.wait_flag(flag, version, check)
        self._copy(group, arrival)
        return arrival

    def _copy(self, group: Group, arrival: Arrival) -> None:
        self.copy(group.index, group.whole, self.pool.copies[group.index], arrival)
