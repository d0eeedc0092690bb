"""Route ``cpu``: copy of the whole group from the node's host copy, which is page-locked."""

from functools import partial

from megatron_ext.runtime.flags import DeviceFlag
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import COPY
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.recorder import log_of
from megatron_ext.runtime.routes.stream_route import StreamRoute
from megatron_ext.runtime.streams import Arrival


class CopyRoute(StreamRoute):
    """Copies whole groups to the device; base of every route from host memory."""

    def __init__(self, name: str, copies: NodeCopies):
        super().__init__(name, copies.device, copies.issuer)
        self.issuer, self.clock = copies.issuer, copies.clock
        self.stream.log = log_of(copies.recorder, "gather", "to_device", "cpu")
        copies.issuer.check = lambda: copies.pool.check_peers(copies.clock.version)


class HostCopy(CopyRoute):
    """Copies the whole group at the clock's version; see :mod:`megatron_ext.runtime.host_pool` for who publishes it."""

    def __init__(self, copies: NodeCopies):
        super().__init__("cpu-route", copies)
        self.pool = copies.pool
        self._waited: dict[int, int] = {}  # by group, the version that the stream has waited for

    def issue(self, group: RankGroup) -> Arrival:
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

    def _copy(self, group: RankGroup, arrival: Arrival) -> None:
        self.copy(group.whole, self.pool.copies[group.index], arrival, f"unshard {group.index}")
