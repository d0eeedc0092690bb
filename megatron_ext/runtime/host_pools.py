"""Several host pools as one: experts are shared by other ranks of a node than all other parameters."""

from collections.abc import Sequence

import torch

from megatron_ext.runtime.flags import DeviceFlag, Flag
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.host_pool import COPY, HostPool


class HostPools:
    """What a rank's routes and its publisher use of ``pools``, each group in the pool that it is in; see
    :class:`HostPool` for what is said there."""

    def __init__(self, pools: list[HostPool]):
        self.pools, self.rank = pools, pools[0].rank
        self._of = {index: pool for pool in pools for index in pool.indices}

    @property
    def reads_done(self) -> list[DeviceFlag]:
        return [flag for pool in self.pools for flag in pool.reads_done]

    @property
    def own_reads_done(self) -> list[DeviceFlag]:
        return [flag for pool in self.pools for flag in pool.own_reads_done]

    def flags_of(self, group: Group, where: int = COPY) -> Sequence[Flag]:
        return self._of[group.index].flags_of(group, where)

    def own_flag(self, group: Group, where: int = COPY) -> Flag:
        return self._of[group.index].own_flag(group, where)

    def copy_of(self, group: Group) -> torch.Tensor:
        return self._of[group.index].copy_of(group)

    def slice_of(self, group: Group, dp_rank: int) -> torch.Tensor:
        return self._of[group.index].slice_of(group, dp_rank)

    def by_thread(self, group: Group) -> bool:
        return self._of[group.index].by_thread(group)

    def is_published(self, group: Group, version: int, where: int = COPY) -> bool:
        return self._of[group.index].is_published(group, version, where)

    def check_published(self, group: Group, version: int, where: int = COPY) -> None:
        self._of[group.index].check_published(group, version, where)

    def publishes(self, group: Group) -> bool:
        return group.index in self._of

    def published(self, group: Group, where: int = COPY) -> list[int]:
        return self._of[group.index].published(group, where)

    def check_reads_done(self, iterations: int) -> None:
        for pool in self.pools:
            pool.check_reads_done(iterations)

    def check_peers(self, version: int) -> None:
        for pool in self.pools:
            pool.check_peers(version)

    def fail(self, error: BaseException) -> None:
        for pool in self.pools:
            pool.fail(error)
