"""Host and NVMe copies of a run: pools, publisher, and the routes that read them."""

import time
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.megatron.agreement import gather_objects
from megatron_ext.megatron.run_summary import say
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_exchange import make_process_groups
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.publisher import Publisher, Target, by_thread
from megatron_ext.runtime.routes.drive_copy import DriveCopy
from megatron_ext.runtime.routes.host_copy import HostCopy
from megatron_ext.schedule.footprint import slot_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import DriveReads

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
        self,
        schedule: Schedule,
        groups,
        offloaded,
        process_group,
        issuer: Issuer,
        clock: Clock,
        faults: Faults,
        recorder,
        nvme_path,
    ):
        self.routes, self.publisher, self.pool, self.closing = {}, None, None, []
        self.drop_staged: Callable[[], None] = _nothing_staged
        self.own_bytes = 0  # this rank's part of the node's host copies
        if not schedule.publish:
            return
        local, nodes = make_process_groups(schedule.parallel)
        targets = [
            Target(groups[entry.group], "cpu" in entry.to, "nvme" in entry.to, offloaded.get(entry.group))
            for entry in schedule.publish
            if entry.group in groups
        ]
        if not targets:
            return
        local = process_group if local is None else local
        exchange = partial(gather_objects, process_group=local)
        device, written = device_of(targets[0].group.whole), by_thread(targets, nodes)
        pool = self.pool = _make_pool(targets, written, local, exchange, device)
        self.closing.append(pool.close)
        issuer.checks.append(lambda: pool.check_peers(clock.version))
        self.own_bytes = sum(copy.numel() * copy.element_size() for copy in pool.copies.values()) // pool.size
        # The drive first: it is shared out by messages among the ranks, which all must reach. Pinning may fail on one
        # alone.
        nvme = _make_nvme_pool(schedule, targets, pool.rank, exchange, device, nvme_path)
        if device.kind == "cuda" and dist.get_rank() == 0 and pool.bytes > SAID_BYTES:
            say(f"page-locking {pool.bytes / 1e9:.0f} GB on every rank; `plan` says how long it takes")
        pool.pin()
        how = (device, issuer, clock, faults)
        if pool.copies:
            self.routes["cpu"] = HostCopy(pool, *how, recorder)
            self.closing.append(self.routes["cpu"].close)
        if nvme is not None:
            route = self.routes["nvme"] = DriveCopy(nvme, pool, *how, schedule.limits.nvme_slots, recorder)
            self.drop_staged = route.drop
            self.closing += [nvme.close, route.close]
        self.publisher = Publisher(targets, pool, nvme, nodes, dist.get_rank(process_group), *how, recorder)


def _make_pool(targets: list[Target], written: set[int], local, exchange, device) -> HostPool:
    """Of the ranks of ``local``; ``written``: groups whose host copy threads write."""
    groups, hosted = [target.group for target in targets], {target.group.index for target in targets if target.host}
    rank, size, progress = dist.get_rank(local), dist.get_world_size(local), _Progress(dist.get_rank())
    on_drive = frozenset(target.group.index for target in targets if target.nvme)
    return HostPool(groups, hosted, written, rank, size, exchange, device, progress, on_drive)


def _make_nvme_pool(schedule: Schedule, targets: list[Target], rank: int, exchange, device, path) -> NvmePool | None:
    """None where no group has a copy on the drive."""
    staged = [target.group for target in targets if target.nvme]
    if not staged:
        return None
    settings = schedule.metadata.options.nvme or DriveReads()
    size = slot_bytes(schedule, parallel_state.get_pipeline_model_parallel_rank())
    slots = dict(slots=schedule.limits.nvme_slots, slot_bytes=size)
    return NvmePool(path, staged, rank, exchange, **slots, settings=settings, device=device)


def _nothing_staged() -> None:
    """There are no staging slots."""
