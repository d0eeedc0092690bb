"""Reads from a drive that bypass the page cache (O_DIRECT), as those of the route ``nvme`` do."""

import mmap
import time

import torch.distributed as dist

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.formats.errors import InputError
from megatron_ext.measure.drive_file import open_filled
from megatron_ext.runtime.drive import MEMORY_FILESYSTEMS, DriveError, filesystem

NAME = "direct reads"
FILE_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes that every rank writes and reads, by kind of device."""

BLOCK_BYTES, QUEUE_DEPTH = 1 << 20, 16


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """Write an unnamed file to the drive, read it back, and report the rate. Collective."""
    if options.nvme is None:
        return [not_tried(NAME, "no directory on a drive was given", "give --nvme DIR to check the nvme route")]
    kind = filesystem(options.nvme)
    if kind in MEMORY_FILESYSTEMS:
        return [failed(NAME, f"{options.nvme} is on {kind}, which is memory", "give a directory on a drive")]
    size = FILE_BYTES[place.device.type]
    try:
        direct, seconds = _read(options.nvme, size)
    except (InputError, DriveError) as error:
        return [failed(NAME, str(error), "give a directory that can be written, with room for a copy of the model")]
    finally:
        dist.barrier(place.everyone)
    rate = size * place.ranks_per_node / seconds / 1e9
    found = f"{options.nvme} ({kind}): {rate:.2f} GB/s by {place.ranks_per_node} ranks of a node together"
    if not direct:
        return [failed(NAME, f"{found}, through the page cache", f"{kind} has no O_DIRECT: give another directory")]
    return [passed(NAME, found, figures={"gb_per_second": rate})]


def _read(directory: str, size: int) -> tuple[bool, float]:
    """Whether reads bypass the page cache, and the seconds that reading takes."""
    file = open_filled(directory, size, block_bytes=BLOCK_BYTES, queue_depth=QUEUE_DEPTH)
    try:
        memory = memoryview(mmap.mmap(-1, size))
        start = time.monotonic()
        file.read(memory, 0, "doctor")
        return file.direct, time.monotonic() - start
    finally:
        file.close()
