"""Finds a directory whose drive does what the product asks of it: a file without a name, read past the page cache. Of
several drives it is the fastest: cases have limits of time."""

import mmap
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.drive import filesystem, open_own
from megatron_ext.workload.drive_reads import DriveReads

LEAST_FREE_BYTES = 8 << 30
"""For the files of all jobs that run at once."""

TRIED_BYTES, DRY_TRIED_BYTES = 256 << 20, 1 << 20
"""That are written and read to see how fast a drive is; on a dry run, to see that it does so at all."""

FAST = 1.5e9
"""Bytes per second: no drive is looked for behind one as fast as that."""


class Drive(NamedTuple):
    """What was found.

    Attributes:
        directory: None where there is none.
        said: why other directories cannot be used.
        rate: bytes per second that it writes and then reads, as cases do.
    """

    directory: Path | None
    said: str
    rate: float


def find(directories: Iterable[Path], least_free: int, tried_bytes: int = TRIED_BYTES) -> Drive:
    """The directory on the fastest drive; of those on one drive the first that can be used."""
    said, rates = [], {}
    devices = set()
    for directory in dict.fromkeys(directories):
        if (device := device_number(directory)) in devices:
            continue
        rate, why = tried(directory, least_free, tried_bytes)
        if why:
            said.append(f"{directory}: {why}")
            continue
        rates[directory] = rate
        devices.add(device)
        if rate >= FAST:
            break
    best = max(rates, key=rates.__getitem__, default=None)
    return Drive(best, "; ".join(said), rates.get(best, 0.0))


def device_number(directory: Path) -> int | None:
    try:
        return os.stat(directory).st_dev
    except OSError:
        return None


def tried(directory: Path, least_free: int, tried_bytes: int) -> tuple[float, str]:
    """Bytes per second, and why files on this drive cannot be used, empty where they can."""
    try:
        kind, free = filesystem(directory), shutil.disk_usage(directory).free
        if free < least_free:
            return 0.0, f"{free >> 20} MiB free on {kind}, {least_free >> 20} MiB are needed"
        blocks = DriveReads(block_bytes=min(DriveReads().block_bytes, tried_bytes // 4))
        file, written = open_own(directory, tried_bytes, blocks), os.urandom(1 << 20) * (tried_bytes >> 20)
        try:
            memory = mmap.mmap(-1, tried_bytes)
            begun = time.monotonic()
            file.write(written, 0, "trying the drive")
            file.flush(0, tried_bytes, "trying the drive")
            file.read(memoryview(memory), 0, "trying the drive")
            took = time.monotonic() - begun
        finally:
            file.close()
        same = memory[:] == written
        return 2 * tried_bytes / took, "" if same else f"what was written on {kind} is not what is read"
    except (InputError, RuntimeError, OSError) as error:  # RuntimeError: of the drive, or no room for its threads
        return 0.0, str(error)
