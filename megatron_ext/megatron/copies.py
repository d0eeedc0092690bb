"""Host and NVMe copies of a run: pools, publisher, and the routes that read them."""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.own_rank import OwnRank
from megatron_ext.megatron.run_summary import say
from megatron_ext.megatron.shards import offloaded_shards
from megatron_ext.runtime.host_pool import HostPool, Sharers
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.node_exchange import NodeExchange
from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.publisher import Publisher, Target, by_thread
from megatron_ext.runtime.routes.host_copy import CopyRoute
from megatron_ext.runtime.routes.make_routes import READERS
from megatron_ext.schedule.footprint import slot_bytes
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.route import Copy, kind_of

T = TypeVar("T")

SAID_EVERY_SECONDS = 5.0
SAID_BYTES = 8e9
"""Size of host copies from which a message is printed, because page-locking them is one call of several seconds."""


class _Progress:
    """Prints, on the first rank of the run, how much of its part of the host copies is made, if that takes long."""

    def __init__(self, rank: int):
        self._speaks, self._said = rank == 0, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._speaks and time.monotonic() - self._said > SAID_EVERY_SECONDS:
            self._said = time.monotonic()
            bar = "#" * (20 * done // total)
            say(f"making host copies [{bar:20}] {done / 1e9:.0f} of {total / 1e9:.0f} GB on each rank")


class Copies:
    """Host and NVMe copies of a rank's published groups: the publisher that writes them and the routes that read them.

    Empty if the schedule publishes nothing. If any rank publishes, every rank makes the process groups, because making
    them is collective.

    Raises:
        InputError: streams of this device cannot store flags.
    """

    def __init__(self, own: OwnRank):
        self.routes: dict[str, CopyRoute] = {}
        self.publisher, self.pool, self.closing = None, None, []
        if not own.schedule.publish:
            return
        sharers = _make_sharers(own)
        targets = _targets(own, {group.index: nodes for one, nodes in sharers for group in one.groups})
        sharers, device = [one for one, _ in sharers], own.device
        if not targets or device is None:
            return
        # If one pool fails, its ranks still make the other one, because ranks without a failure may wait for it: the
        # drive is also divided by messages. Pinning may fail on a single rank.
        errors: list[InputError] = []
        pool = _tried(errors, _make_pool, targets, sharers, device)
        nvme = _tried(errors, _make_nvme_pool, own, targets, sharers)
        if pool is None or errors:
            raise errors[0]
        self.pool = pool
        self.closing.append(pool.close)
        if device.kind == "cuda" and dist.get_rank() == 0 and pool.bytes > SAID_BYTES:
            say(f"page-locking {pool.bytes / 1e9:.0f} GB on every rank; `plan` says how long it takes")
        pool.pin()
        copies = NodeCopies(pool, nvme, device, own.issuer, own.clock, own.links)
        there: dict[Copy | None, bool] = {"cpu": bool(pool.copies), "nvme": nvme is not None}
        self.routes = {name: make(copies) for name, make in READERS.items() if there.get(kind_of(name).copy)}
        self.closing += [] if nvme is None else [nvme.close]
        self.closing += [route.close for route in self.routes.values()]
        self.publisher = Publisher(targets, copies)

    def drop_staged(self) -> None:
        """Empty the staging slots."""
        for route in self.routes.values():
            route.drop()


def _make_sharers(own: OwnRank) -> list[tuple[Sharers, NodeExchange | None]]:
    """Sharers of this rank's published groups, which are in the order of publishing, with the exchange with other
    nodes: one entry for each number of ranks that groups are sharded over. Collective over all ranks of the run."""
    planned, published, found = own.schedule.groups, [entry.group for entry in own.schedule.publish], []
    for ranks in sorted({planned[index].ranks for index in published}, reverse=True):
        nodes = make_node_groups(own.schedule.parallel, ranks=ranks)
        groups = [own.groups[index] for index in published if index in own.groups and planned[index].ranks == ranks]
        if groups:
            among = own.process_groups[ranks] if nodes is None else nodes.local
            exchange = partial(gather_objects, process_group=among)
            sharers = Sharers(groups, dist.get_rank(among), dist.get_world_size(among), exchange)
            found.append((sharers, None if nodes is None else NodeExchange(nodes)))
    return found


def _targets(own: OwnRank, nodes_of: dict[int, NodeExchange | None]) -> list[Target]:
    """One target for each group that this rank publishes, with the source from which it is published."""
    offloaded = offloaded_shards(own.optimizers, own.buckets)
    # If states do not rest in host memory there is no such copy: the group is published from its shard.
    source = {i: copy for i, copy in offloaded.items() if own.schedule.groups[i].states_rest is None}
    return [
        Target(own.groups[index], "cpu" in to, "nvme" in to, source.get(index), nodes_of[index])
        for index, to in ((entry.group, entry.to) for entry in own.schedule.publish)
        if index in nodes_of
    ]


def _tried(errors: list[InputError], make: Callable[..., T], *arguments) -> T | None:
    """The result of ``make``; None if it raises InputError, which is added to ``errors``."""
    try:
        return make(*arguments)
    except InputError as error:
        errors.append(error)
        return None


def _make_pool(targets: list[Target], sharers: list[Sharers], device) -> HostPool:
    hosted = {target.group.index for target in targets if target.host}
    on_drive = {target.group.index for target in targets if target.nvme}
    return HostPool(sharers, hosted, by_thread(targets), device, _Progress(dist.get_rank()), on_drive)


def _make_nvme_pool(own: OwnRank, targets: list[Target], sharers: list[Sharers]) -> NvmePool | None:
    """The pool of copies on the drive; None if no group has such a copy."""
    staged = {target.group.index for target in targets if target.nvme}
    sharing = [one._replace(groups=[group for group in one.groups if group.index in staged]) for one in sharers]
    sharing = [one for one in sharing if one.groups]
    if not sharing:
        return None
    settings = own.schedule.metadata.options.nvme or DriveReads()
    slots = dict(slots=own.schedule.limits.nvme_slots, slot_bytes=slot_bytes(own.schedule, own.pp_rank))
    return NvmePool(own.nvme_path, sharing, **slots, settings=settings, device=own.device)
