"""Finds a directory whose drive does what the product asks of it: a file without a name, read past the page cache."""

import mmap
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.drive import DriveError, filesystem, open_own
from megatron_ext.workload.drive_reads import DriveReads

LEAST_FREE_BYTES = 8 << 30
"""For the files of all jobs that run at once."""

TRIED_BYTES = 1 << 20


def find(directories: Iterable[Path], least_free: int) -> tuple[Path | None, str]:
    """The first of ``directories`` that can be used; None where there is none, and why each cannot."""
    said = []
    for directory in dict.fromkeys(directories):
        why = unusable(directory, least_free)
        if not why:
            return directory, "; ".join(said)
        said.append(f"{directory}: {why}")
    return None, "; ".join(said)


def unusable(directory: Path, least_free: int) -> str:
    """Why files on this drive cannot be used; empty where they can."""
    try:
        kind, free = filesystem(directory), shutil.disk_usage(directory).free
        if free < least_free:
            return f"{free >> 20} MiB free on {kind}, {least_free >> 20} MiB are needed"
        file = open_own(directory, TRIED_BYTES, DriveReads(block_bytes=TRIED_BYTES // 4, queue_depth=2))
        try:
            memory = memoryview(mmap.mmap(-1, TRIED_BYTES))
            file.write(b"\1" * TRIED_BYTES, 0, "trying the drive")
            file.flush(0, TRIED_BYTES, "trying the drive")
            file.read(memory, 0, "trying the drive")
        finally:
            file.close()
        return "" if bytes(memory) == b"\1" * TRIED_BYTES else f"what was written on {kind} is not what is read"
    except (InputError, DriveError, OSError) as error:
        return str(error)
