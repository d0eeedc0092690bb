"""All checks of one rank, in order; rank 0 keeps the report up to date.

[Note: A check that ends the process]
The report is written before a check begins, with this check marked as one that did not end, and again when it has
ended. So whatever happens to the processes, the file says how far they came. A check that hangs is given up after a
time, and the stacks of all threads are written. Its processes end as well, because its collectives cannot be cancelled.
start_ranks.py then makes the checks that are left in new processes. It does the same after a check that raised an
error, because a device may answer every later call with that error.
"""

import contextlib
import faulthandler
import functools
import math
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import IO

import torch.distributed as dist
from msgspec.structs import replace

from megatron_ext import __version__
from megatron_ext.doctor import (
    communicators,
    direct_reads,
    finding,
    node_limits,
    overlap,
    shared_pinning,
    software,
    stream_operations,
    symmetric_buffers,
    training_check,
)
from megatron_ext.doctor import stacks as stacks_of_ranks
from megatron_ext.doctor.finding import DoctorReport, Finding
from megatron_ext.doctor.place import DoctorOptions, Place, find_place
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.formats.facts import RANKS_PER_DEVICE
from megatron_ext.formats.versions import SCHEMA_VERSION
from megatron_ext.measure.cluster_launch import meet
from megatron_ext.measure.fabric import Fabric, shared_fabric
from megatron_ext.measure.options import Options
from megatron_ext.runtime import machine
from megatron_ext.runtime.device import has_cuda
from megatron_ext.runtime.objects import gather_objects

TRANSFER_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of one transfer whose overlap is measured, by kind of device."""

CHECKS: dict[str, Callable[["_Checks"], list[Finding]]] = {
    "versions": lambda run: software.check(run.place, run.options),
    "limits of this node": lambda run: node_limits.check(run.place, run.options),
    "shared and page-locked memory": lambda run: shared_pinning.check(run.place, run.options),
    "stream memory operations": lambda run: stream_operations.check(run.place, run.options),
    "direct reads": lambda run: direct_reads.check(run.place, run.options),
    "overlap": lambda run: overlap.check(run.place, run.fabric, TRANSFER_BYTES[run.place.device.type]),
    "communicators": lambda run: communicators.check(run.place, run.fabric),
    "symmetric buffers": lambda run: symmetric_buffers.check(run.place, run.fabric),
    training_check.MEGATRON: lambda run: [training_check.ready()],
    **{
        case.check: lambda run, case=case: training_check.check(run.place, run.options, case)
        for case in training_check.CASES
    },
}
"""Checks by title, in the order in which they are made."""

LONGER = dict.fromkeys((training_check.MEGATRON, *(c.check for c in training_check.CASES if c.all_on_host)), 3.0)
"""How many times as long as other checks these may take: they import Megatron and Transformer Engine, or train a large
model three times."""

HELD_SECONDS = 2.0
"""Seconds after a check was given up until the process ends, even if a thread holds the interpreter's lock."""


def run(options: DoctorOptions, ranks_per_node: int, say: Callable[[str], None]) -> DoctorReport:
    """Make all checks, as one of the ranks that a launcher has started. Collective.

    Args:
        ranks_per_node: ranks that share a node.
        say: called on rank 0 with the check that begins.

    Returns:
        The report; rank 0's is also in ``options.out``.
    """
    use_cuda = options.device != "cpu" and has_cuda()
    store = meet(use_cuda, Options(device="cpu").rank_threads)
    place = find_place(use_cuda, ranks_per_node)
    if options.deadline == math.inf:  # the time that ranks take to start and meet does not count
        options = replace(options, deadline=time.monotonic() + options.seconds)
        if options.stacks and place.rank == 0:
            stacks_of_ranks.deadline_path(options.stacks).write_text(str(options.deadline))
    return _Checks(place, options, say, store).run()


class _Checks:
    def __init__(self, place: Place, options: DoctorOptions, say: Callable[[str], None], store):
        self.place, self.options, self.say, self.store = place, options, say, store
        self.findings: list[Finding] = list(options.earlier)
        self.machine = machine.environment(options.device)
        if place.ranks_per_device > 1:
            self.machine["hardware"] = {**self.machine["hardware"], RANKS_PER_DEVICE: place.ranks_per_device}
        self._created_at = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def run(self) -> DoctorReport:
        wanted = [title for title in CHECKS if title in (self.options.titles or CHECKS)]
        if self.options.earlier:  # the time that these processes take to start does not count for the first check
            training_check.ready()
        with self._open_stacks() as stacks:
            faulthandler.enable(stacks)
            for number, title in enumerate(wanted, 1):
                later = [finding.not_reached(title) for title in wanted[number:]]
                if not self._part(title, later, stacks):
                    return self._write(*later)
            faulthandler.enable()
        return self._write()

    def _open_stacks(self) -> IO[str]:
        folder, rank = self.options.stacks, self.place.rank
        return stacks_of_ranks.path_of(folder, rank).open("w") if folder else tempfile.TemporaryFile("w+")

    def _part(self, title: str, later: list[Finding], stacks: IO[str]) -> bool:
        """Make one check, and return whether these processes can make more."""
        left = self.options.deadline - time.monotonic()
        if self._agreed(left <= 0):
            self.findings.append(finding.no_time(title, self.options.seconds))
            return True
        advice = "the processes ended or hung in this check: send this report and their output"
        begun = (finding.failed(title, finding.DID_NOT_END, advice), *later)
        self._write(*begun)
        if self.place.rank == 0:
            self.say(title)
        patience = self.options.check_seconds * LONGER.get(title, 1.0)
        seconds = max(min(patience, left), 1.0)
        with _given_up_after(seconds, stacks, lambda: self._last_words(seconds, patience, begun, stacks)):
            try:
                own, raised = CHECKS[title](self), False
            except (InputError, RuntimeError, OSError) as error:
                traceback.print_exc()
                own = [finding.failed(title, one_line(f"{type(error).__name__}: {error}", 300), "send this report")]
                raised = not isinstance(error, InputError)
            of_ranks = gather_objects((own, raised), self.place.everyone)
        self.findings += finding.merged([findings for findings, _ in of_ranks])
        return not (self.options.stacks and any(raised for _, raised in of_ranks))

    def _agreed(self, value: bool) -> bool:
        """Rank 0's ``value`` on all ranks, because their clocks differ."""
        return gather_objects(value, self.place.everyone)[0]

    def _last_words(self, seconds: float, patience: float, begun: tuple[Finding, ...], stacks: IO[str]) -> None:
        """On rank 0, after its stacks: print the report, because under a launcher no other process does."""
        self.say(f"{begun[0].check}: given up after {seconds:.0f} s")
        report = self._write(given_up(begun[0], seconds, patience, self.options, stacks), *begun[1:])
        if not self.options.stacks:
            self.say(finding.text(report))

    @functools.cached_property
    def fabric(self) -> Fabric:
        """The fabric that issues transfers, made when it is first needed. Collective."""
        place = self.place
        wanted = Options(
            data_parallel_size=place.world_size,
            device=place.device.type,  # pyright: ignore[reportArgumentType] - cpu or cuda
            max_bytes=16 * TRANSFER_BYTES[place.device.type],
            ranks_per_node=place.ranks_per_node,
        )
        shared = place.exchange, self.store, place.everyone
        return shared_fabric(wanted, place.rank, *shared, field="ranks of a node")

    def _write(self, *more: Finding) -> DoctorReport:
        report = DoctorReport(
            schema_version=SCHEMA_VERSION,
            kind="doctor_report",
            created_at=self._created_at,
            version=__version__,
            ranks=self.place.world_size,
            nodes=self.place.nodes,
            machine=self.machine,
            findings=(*self.findings, *more),
        )
        if self.place.rank == 0:
            json_files.save(self.options.out, report, indent=1)
        return report


def given_up(begun: Finding, seconds: float, patience: float, options: DoctorOptions, stacks: IO[str]) -> Finding:
    """The finding of a check that has not ended in ``seconds``. If it had less than its ``patience``, because the time
    for all checks is over, it has not failed; otherwise the process that started the ranks reads their stacks."""
    if seconds < patience:
        return finding.no_time(begun.check, options.seconds)
    if options.stacks:
        return begun
    stacks.seek(0)
    where = " < ".join(stacks_of_ranks.main_thread(stacks.read()))
    return replace(begun, found=f"did not end in {seconds:.0f} s: rank 0 in {where}")


@contextlib.contextmanager
def _given_up_after(seconds: float, stacks: IO[str], last_words: Callable[[], None]) -> Iterator[None]:
    """End the process if the body of this context takes longer, with the stacks of all threads in ``stacks``."""

    def give_up() -> None:
        faulthandler.dump_traceback(stacks)
        stacks.flush()
        if dist.get_rank() == 0:
            last_words()
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + HELD_SECONDS, exit=True, file=stacks)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
