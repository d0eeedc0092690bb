"""All checks of one rank, in order; rank 0 keeps the report up to date.

[Note: A check that ends the process]
The report is written before a check begins, with the check in it as one that did not end, and again when it has. So
whatever happens to the processes, the file says how far they came. A check that hangs is given up after a time, and
the run with it: its collectives cannot be taken back.
"""

import contextlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import torch
import torch.distributed as dist

from megatron_ext import __version__
from megatron_ext.cpubench import gloo
from megatron_ext.doctor import (
    communicators,
    direct_reads,
    node_limits,
    overlap,
    shared_pinning,
    software,
    stream_operations,
    symmetric_buffers,
    training_check,
)
from megatron_ext.doctor.finding import KIND, Finding, Report, failed, merged, not_tried, save
from megatron_ext.doctor.place import DoctorOptions, Place, find_place
from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.formats.versions import SCHEMA_VERSION
from megatron_ext.measure.fabric import Fabric, shared_bytes
from megatron_ext.measure.hostcpu.board import StoreBoard
from megatron_ext.measure.options import Options
from megatron_ext.runtime import machine, shared_block
from megatron_ext.runtime.device import has_cuda

TRANSFER_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Of one transfer whose overlap is measured, by kind of device."""

TITLES = {
    "software": "versions",
    "node_limits": "limits of this node",
    "shared_pinning": "shared and page-locked memory",
    "stream_operations": "stream memory operations",
    "direct_reads": "direct reads",
    "overlap": "overlap",
    "communicators": "communicators",
    "symmetric_buffers": "symmetric buffers",
    "training": "training",
}
"""What the parts of the doctor look at, in their order."""


def run(options: DoctorOptions, ranks_per_node: int, say: Callable[[str], None]) -> Report:
    """All checks, as one rank of those that a launcher has started. Collective.

    Args:
        ranks_per_node: ranks that share a node.
        say: told the part that begins, on rank 0.

    Returns:
        The report; rank 0's is also in ``options.out``.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    use_cuda = options.device != "cpu" and has_cuda()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    gloo.run_collectives_in_order()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    place = find_place(use_cuda, ranks_per_node)
    return _Checks(place, options, say).run()


class _Checks:
    def __init__(self, place: Place, options: DoctorOptions, say: Callable[[str], None]):
        self.place, self.options, self.say = place, options, say
        self.findings: list[Finding] = []
        self.machine = machine.environment(options.device)
        self._fabric: Fabric | None = None
        self._created_at = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def run(self) -> Report:
        parts: dict[str, Callable[[], list[Finding]]] = {
            "software": lambda: software.check(self.place, self.options),
            "node_limits": lambda: node_limits.check(self.place, self.options),
            "shared_pinning": lambda: shared_pinning.check(self.place, self.options),
            "stream_operations": lambda: stream_operations.check(self.place, self.options),
            "direct_reads": lambda: direct_reads.check(self.place, self.options),
            "overlap": lambda: overlap.check(self.place, self.fabric(), TRANSFER_BYTES[self.place.device.type]),
            "communicators": lambda: communicators.check(self.place, self.fabric()),
            "symmetric_buffers": lambda: symmetric_buffers.check(self.place, self.fabric()),
            "training": lambda: training_check.check(self.place, self.options),
        }
        for name in TITLES:
            self._part(TITLES[name], parts[name])
        return self._write()

    def _part(self, title: str, check: Callable[[], list[Finding]]) -> None:
        later = list(TITLES.values())[list(TITLES.values()).index(title) + 1 :]
        advice = "the processes ended or hung in this part: send this report, and what they printed"
        self._write(failed(title, "did not end", advice), *(not_tried(name, "not reached") for name in later))
        if self.place.rank == 0:
            self.say(title)
        with _given_up_after(self.options.check_seconds, title, self.place.rank, self.say):
            try:
                own = check()
            except (InputError, RuntimeError, OSError) as error:
                traceback.print_exc()
                own = [failed(title, one_line(f"{type(error).__name__}: {error}", 300), "send this report")]
            of_ranks: list = [None] * self.place.world_size
            dist.all_gather_object(of_ranks, own, group=self.place.everyone)
        self.findings += merged(of_ranks)

    def fabric(self) -> Fabric:
        """What transfers are issued by, made when it is first needed. Collective."""
        if self._fabric is None:
            place = self.place
            size = 16 * TRANSFER_BYTES[place.device.type]
            wanted = Options(
                data_parallel_size=place.world_size,
                device=place.device.type,  # pyright: ignore[reportArgumentType] - cpu or cuda
                max_bytes=size,
                ranks_per_node=place.ranks_per_node,
            )
            block = shared_block.share(shared_bytes(wanted), place.local_rank, place.exchange, field="ranks of a node")
            store = dist.distributed_c10d._get_default_store()
            board = StoreBoard(store, place.rank, place.everyone) if place.nodes > 1 else None
            self._fabric = Fabric(wanted, place.rank, block, board)
        return self._fabric

    def _write(self, *more: Finding) -> Report:
        report = Report(
            schema_version=SCHEMA_VERSION,
            kind=KIND,
            created_at=self._created_at,
            version=__version__,
            ranks=self.place.world_size,
            nodes=self.place.nodes,
            machine=self.machine,
            findings=(*self.findings, *more),
        )
        if self.place.rank == 0:
            save(self.options.out, report)
        return report


@contextlib.contextmanager
def _given_up_after(seconds: float, title: str, rank: int, say: Callable[[str], None]) -> Iterator[None]:
    """End the process where what is inside takes longer: the report says already that it did not end."""

    def give_up() -> None:
        if rank == 0:
            say(f"{title}: given up after {seconds:.0f} s")
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
