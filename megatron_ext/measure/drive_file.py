"""The file that a rank measures the drive with: the run's own, filled with bytes that do not compress."""

import mmap
import os

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.drive import DriveError, DriveFile, aligned, create
from megatron_ext.workload.drive_reads import DriveReads

OPTION = "--nvme-path"


def open_filled(directory: str, size_bytes: int, *, block_bytes: int, queue_depth: int) -> DriveFile:
    """A nameless file of ``size_bytes`` (a multiple of the drive's block) in ``directory``.

    Raises:
        InputError: the directory is missing or not writable, or the drive is full.
    """
    descriptor = create(directory, aligned(size_bytes), option=OPTION, memory=True)
    file = DriveFile(
        descriptor, directory, DriveReads(block_bytes=block_bytes, queue_depth=queue_depth), need_direct=False
    )
    # Reserved blocks that nobody has written are not read from the drive.
    piece = memoryview(mmap.mmap(-1, min(aligned(size_bytes), 4 << 20)))
    piece[:] = os.urandom(len(piece))
    try:
        for offset in range(0, aligned(size_bytes), len(piece)):
            file.write(piece[: aligned(size_bytes) - offset], offset, "filling")
        file.flush(0, aligned(size_bytes), "filling")  # what is still being written would disturb what is read
    except DriveError as error:
        file.close()
        raise InputError(str(error), field=OPTION, value=directory) from None
    return file
