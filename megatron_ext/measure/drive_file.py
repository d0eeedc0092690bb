"""The file with which a rank measures the drive: the same kind as the run's, filled with bytes that do not compress."""

import mmap
import os

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.drive import DriveError, DriveFile, aligned, create_file
from megatron_ext.workload.drive_reads import DriveReads

OPTION = "--nvme-path"


def open_filled(directory: str, size_bytes: int, *, block_bytes: int, queue_depth: int) -> DriveFile:
    """A file without a name, of ``size_bytes`` (a multiple of the drive's block), in ``directory``.

    Raises:
        InputError: the directory is missing or not writable, or the drive is full.
    """
    # The file is filled: reserved blocks that were never written are not read from the drive.
    piece = memoryview(mmap.mmap(-1, min(aligned(size_bytes), 4 << 20)))
    piece[:] = os.urandom(len(piece))
    descriptor = create_file(directory, aligned(size_bytes), option=OPTION, memory=True)
    reads = DriveReads(block_bytes=block_bytes, queue_depth=queue_depth)
    file = DriveFile(descriptor, directory, reads, need_direct=False)
    try:
        for offset in range(0, aligned(size_bytes), len(piece)):
            file.write(piece[: aligned(size_bytes) - offset], offset, "filling")
        file.flush(0, aligned(size_bytes), "filling")  # writes in progress would disturb the reads
    except DriveError as error:
        file.close()
        raise InputError(str(error), field=OPTION, value=directory) from None
    return file
