"""Host and NVMe copies of a run: pools, publisher, and the routes that read them."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.agreement import gather_objects
from megatron_ext.megatron.run_summary import say
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.host_pools import HostPools
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_exchange import NodeExchange, make_process_groups
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.publisher import Publisher, Target, by_thread
from megatron_ext.runtime.routes.drive_copy import DriveCopy
from megatron_ext.runtime.routes.host_copy import HostCopy
from megatron_ext.schedule.footprint import slot_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import DriveReads

T = TypeVar("T")

SAID_EVERY_SECONDS = 5.0
SAID_BYTES = 8e9
"""Of host copies: what takes seconds to page-lock, in one call that says nothing meanwhile."""


class _Progress:
    """Says on the first rank of the run how much of its part of the host copies is there, where that takes long."""

    def __init__(self, rank: int):
        self._speaks, self._said = rank == 0, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._speaks and time.monotonic() - self._said > SAID_EVERY_SECONDS:
            self._said = time.monotonic()
            say(f"making host copies {bar(done / total)} {done / 1e9:.0f} of {total / 1e9:.0f} GB on each rank")


def bar(share: float) -> str:
    """A progress bar for logs, which have lines and no cursor."""
    return f"[{'#' * round(20 * share):20}]"


class Copies:
    """Host and NVMe copies of a rank's published groups: what writes them and what reads them.

    Nothing where the schedule publishes nothing. As soon as any rank publishes, every rank makes the process groups:
    these are made by all together.

    Raises:
        InputError: streams of this device cannot store flags.
    """

    def __init__(
        self, schedule: Schedule, groups, offloaded, process_groups, issuer: Issuer, clock: Clock, recorder, nvme_path
    ):
        self.routes, self.publisher, self.pool, self.closing = {}, None, None, []
        self.drop_staged: Callable[[], None] = _nothing_staged
        self.own_bytes = 0  # this rank's part of the node's host copies
        if not schedule.publish:
            return
        sharers = _make_sharers(schedule, groups, process_groups)
        targets = [
            Target(group, "cpu" in entry.to, "nvme" in entry.to, offloaded.get(entry.group), own.nodes)
            for entry in schedule.publish
            if (group := groups.get(entry.group)) is not None
            for own in sharers
            if entry.group in own.indices
        ]
        if not targets:
            return
        device = device_of(targets[0].group.whole)
        # Where one fails its ranks still make the others, for which ranks may wait that know of no failure.
        errors: list[InputError] = []
        pools = [made for own in sharers if (made := _tried(errors, _make_pool, targets, own, device)) is not None]
        # Then the drive: it is shared out by messages, too. Pinning may fail on one rank alone.
        nvme = _tried(errors, _make_nvme_pool, schedule, targets, sharers, device, nvme_path)
        if errors:
            raise errors[0]
        self.closing += [one.close for one in pools]
        pool: HostPool | HostPools = pools[0] if len(pools) == 1 else HostPools(pools)
        self.pool = pool
        issuer.checks.append(lambda: pool.check_peers(clock.version))
        copies = [(copy.nbytes, one.size) for one in pools for copy in one.copies.values()]
        self.own_bytes = sum(size // ranks for size, ranks in copies)
        pinned = sum(one.bytes for one in pools)
        if device.kind == "cuda" and dist.get_rank() == 0 and pinned > SAID_BYTES:
            say(f"page-locking {pinned / 1e9:.0f} GB on every rank; `plan` says how long it takes")
        for one in pools:
            one.pin()
        how = (device, issuer, clock)
        if copies:
            self.routes["cpu"] = HostCopy(pool, *how, recorder)
            self.closing.append(self.routes["cpu"].close)
        if nvme is not None:
            route = self.routes["nvme"] = DriveCopy(nvme, pool, *how, schedule.limits.nvme_slots, recorder)
            self.drop_staged = route.drop
            self.closing += [nvme.close, route.close]
        self.publisher = Publisher(targets, pool, nvme, *how, recorder)


class _Sharers(NamedTuple):
    """Ranks of this node that share the copies of the groups ``indices``: experts have others than all else.

    Attributes:
        local: their process group.
        nodes: the exchange with those of other nodes.
    """

    indices: frozenset[int]
    local: dist.ProcessGroup
    nodes: NodeExchange

    @property
    def rank(self) -> int:
        return dist.get_rank(self.local)

    def exchange(self, value) -> list:
        return gather_objects(value, process_group=self.local)


def _make_sharers(schedule: Schedule, groups, process_groups) -> list[_Sharers]:
    """Of this rank's published groups. Collective over all ranks of the run."""
    published, found = {entry.group for entry in schedule.publish}, []
    for ranks in sorted({schedule.groups[index].ranks for index in published}, reverse=True):
        local, nodes = make_process_groups(schedule.parallel, ranks)
        indices = frozenset(index for index in published & set(groups) if schedule.groups[index].ranks == ranks)
        if indices:
            found.append(_Sharers(indices, process_groups[ranks] if local is None else local, nodes))
    return found


def _tried(errors: list[InputError], make: Callable[..., T], *arguments) -> T | None:
    """What ``make`` returns; None where it raises, which is added to ``errors``."""
    try:
        return make(*arguments)
    except InputError as error:
        errors.append(error)
        return None


def _make_pool(all_targets: list[Target], own: _Sharers, device) -> HostPool:
    targets = [target for target in all_targets if target.group.index in own.indices]
    groups, hosted = [target.group for target in targets], {target.group.index for target in targets if target.host}
    size, progress = dist.get_world_size(own.local), _Progress(dist.get_rank())
    on_drive = frozenset(target.group.index for target in targets if target.nvme)
    return HostPool(groups, hosted, by_thread(targets), own.rank, size, own.exchange, device, progress, on_drive)


def _make_nvme_pool(
    schedule: Schedule, targets: list[Target], sharers: list[_Sharers], device, path
) -> NvmePool | None:
    """None where no group has a copy on the drive."""
    staged = [
        (groups, own.rank, own.exchange)
        for own in sharers
        if (groups := [one.group for one in targets if one.nvme and one.group.index in own.indices])
    ]
    if not staged:
        return None
    settings = schedule.metadata.options.nvme or DriveReads()
    size = slot_bytes(schedule, parallel_state.get_pipeline_model_parallel_rank())
    slots = dict(slots=schedule.limits.nvme_slots, slot_bytes=size)
    return NvmePool(path, *staged[0], others=staged[1:], **slots, settings=settings, device=device)


def _nothing_staged() -> None:
    """There are no staging slots."""
