"""Reads from a drive that bypass the page cache (O_DIRECT), as those of the route ``nvme`` do."""

import contextlib
import time

import torch.distributed as dist

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.formats.errors import InputError
from megatron_ext.measure.drive_file import open_filled
from megatron_ext.runtime import block_pages
from megatron_ext.runtime.drive import aligned, filesystem, refuse_no_drive
from megatron_ext.runtime.objects import gather_objects

NAME = "direct reads"
FILE_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes that the ranks of a node write and read together, by kind of device."""

BLOCK_BYTES, QUEUE_DEPTH = 1 << 20, 16


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """Write an unnamed file to the drive, read it back, and report the rate. Collective."""
    if options.nvme is None:
        return [not_tried(NAME, "no directory on a drive was given", "give --nvme DIR to check the nvme route")]
    size, error, direct, seconds = aligned(FILE_BYTES[place.device.type] // place.ranks_per_node), "", True, 0.0
    try:
        direct, seconds = _read(place, options.nvme, size)
    except (InputError, RuntimeError, OSError) as refused:  # no threads can be started, for example
        error = str(refused)
    slowest = max(gather_objects(seconds, place.everyone))
    if error:
        advice = "give a directory on a drive that can be written, with room for a copy of the model"
        return [failed(NAME, error, advice)]
    kind, rate = filesystem(options.nvme), size * place.ranks_per_node / slowest / 1e9
    found = f"{options.nvme} ({kind}): {rate:.2f} GB/s by {place.ranks_per_node} ranks of a node together"
    if not direct:
        return [failed(NAME, f"{found}, through the page cache", f"{kind} has no O_DIRECT: give another directory")]
    return [passed(NAME, found, figures={"gb_per_second": rate})]


def _read(place: Place, directory: str, size: int) -> tuple[bool, float]:
    """Whether reads bypass the page cache, and the seconds that reading takes while all ranks read. Collective."""
    with contextlib.ExitStack() as opened:
        try:
            refuse_no_drive(directory, "--nvme")
            file = open_filled(directory, size, block_bytes=BLOCK_BYTES, queue_depth=QUEUE_DEPTH)
            opened.callback(file.close)
            memory = memoryview(block_pages.private(size))  # with pages, like a staging slot: making them takes longer
        finally:
            dist.barrier(place.everyone)  # no rank reads while another still writes, nor alone
        start = time.monotonic()
        file.read(memory, 0, "doctor")
        return file.direct, time.monotonic() - start
