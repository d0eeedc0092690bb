"""Host and NVMe copies of a run: pools, publisher, and the routes that read them."""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.agreement import gather_objects
from megatron_ext.megatron.run_summary import say
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.host_pool import HostPool, Sharers
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_exchange import NodeExchange
from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.publisher import Publisher, Target, by_thread
from megatron_ext.runtime.routes.host_copy import CopyRoute
from megatron_ext.runtime.routes.makers import READERS, Sources
from megatron_ext.schedule.footprint import slot_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.route import Copy, kind_of

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
        self.routes: dict[str, CopyRoute] = {}
        self.publisher, self.pool, self.closing = None, None, []
        self.own_bytes = 0  # this rank's part of the node's host copies
        if not schedule.publish:
            return
        sharers = _make_sharers(schedule, groups, process_groups)
        nodes_of = {group.index: nodes for own, nodes in sharers for group in own.groups}
        targets = [
            Target(groups[entry.group], "cpu" in entry.to, "nvme" in entry.to, offloaded.get(entry.group), nodes)
            for entry in schedule.publish
            if (nodes := nodes_of.get(entry.group)) is not None
        ]
        if not targets:
            return
        sharers = [own for own, _ in sharers]
        device = device_of(targets[0].group.whole)
        # Where one fails its ranks still make the other, for which ranks may wait that know of no failure: the drive is
        # shared out by messages, too. Pinning may fail on one rank alone.
        errors: list[InputError] = []
        pool = _tried(errors, _make_pool, targets, sharers, device)
        nvme = _tried(errors, _make_nvme_pool, schedule, targets, sharers, device, nvme_path)
        if pool is None or errors:
            raise errors[0]
        self.pool = pool
        self.closing.append(pool.close)
        issuer.checks.append(lambda: pool.check_peers(clock.version))
        self.own_bytes = pool.own_bytes
        if device.kind == "cuda" and dist.get_rank() == 0 and pool.bytes > SAID_BYTES:
            say(f"page-locking {pool.bytes / 1e9:.0f} GB on every rank; `plan` says how long it takes")
        pool.pin()
        sources = Sources(pool, nvme, device, issuer, clock, recorder)
        there: dict[Copy | None, bool] = {"cpu": bool(pool.copies), "nvme": nvme is not None}
        self.routes = {name: make(sources) for name, make in READERS.items() if there.get(kind_of(name).copy)}
        self.closing += [] if nvme is None else [nvme.close]
        self.closing += [route.close for route in self.routes.values()]
        self.publisher = Publisher(targets, pool, nvme, device, issuer, clock, recorder)

    def drop_staged(self) -> None:
        """Empty the staging slots."""
        for route in self.routes.values():
            route.drop()


def _make_sharers(schedule: Schedule, groups, process_groups) -> list[tuple[Sharers, NodeExchange]]:
    """Of this rank's published groups, in the order of publishing, each with the exchange with those of other nodes.
    Collective over all ranks of the run."""
    published, found = [entry.group for entry in schedule.publish], []
    for ranks in sorted({schedule.groups[index].ranks for index in published}, reverse=True):
        nodes = make_node_groups(schedule.parallel, ranks=ranks)
        own = [groups[index] for index in published if index in groups and schedule.groups[index].ranks == ranks]
        if own:
            among = process_groups[ranks] if nodes is None else nodes.local
            exchange = partial(gather_objects, process_group=among)
            found.append(
                (Sharers(own, dist.get_rank(among), dist.get_world_size(among), exchange), NodeExchange(nodes))
            )
    return found


def _tried(errors: list[InputError], make: Callable[..., T], *arguments) -> T | None:
    """What ``make`` returns; None where it raises, which is added to ``errors``."""
    try:
        return make(*arguments)
    except InputError as error:
        errors.append(error)
        return None


def _make_pool(targets: list[Target], sharers: list[Sharers], device) -> HostPool:
    hosted = {target.group.index for target in targets if target.host}
    on_drive = {target.group.index for target in targets if target.nvme}
    return HostPool(sharers, hosted, by_thread(targets), device, _Progress(dist.get_rank()), on_drive)


def _make_nvme_pool(schedule: Schedule, targets: list[Target], sharers: list[Sharers], device, path) -> NvmePool | None:
    """None where no group has a copy on the drive."""
    staged = {target.group.index for target in targets if target.nvme}
    sharing = [own._replace(groups=[group for group in own.groups if group.index in staged]) for own in sharers]
    sharing = [own for own in sharing if own.groups]
    if not sharing:
        return None
    settings = schedule.metadata.options.nvme or DriveReads()
    size = slot_bytes(schedule, parallel_state.get_pipeline_model_parallel_rank())
    slots = dict(slots=schedule.limits.nvme_slots, slot_bytes=size)
    return NvmePool(path, sharing, **slots, settings=settings, device=device)
