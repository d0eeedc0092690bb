"""A block of memory that the ranks of a node share and that leaves nothing behind.

[Note: No name to leak]
The block is an anonymous memory file (memfd): it has no name in /dev/shm or anywhere else, is private to the user
(mode 0600), and is freed when its last process ends, for whatever reason. Ranks hand it to each other as
/proc/<pid>/fd/<fd>, which only the same user may open. Containers limit the size of /dev/shm, but not of this.
"""

import mmap
import os
from collections.abc import Callable

from megatron_ext.formats.errors import InputError


def create_block(size: int) -> int:
    """A descriptor of a new block of ``size`` zeroed bytes. Processes started later do not inherit it by default."""
    descriptor = os.memfd_create("megatron_ext", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, size)
    return descriptor


def mapped(descriptor: int, size: int) -> mmap.mmap:
    """A file as memory. Its descriptor is closed: the mapping holds the file."""
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def share(size: int, rank: int, exchange: Callable[[object], list], *, field: str) -> int:
    """A descriptor of one block of ``size`` bytes, the same block on every rank; see :func:`share_file`."""
    return share_file(lambda: create_block(size), rank, exchange, field=field)[0]


def share_file(
    make: Callable[[], int], rank: int, exchange: Callable[[object], list], *, field: str
) -> tuple[int, int]:
    """A descriptor of one nameless file, the same file on every rank, and the process id of its maker. Collective.

    Args:
        make: called on rank 0; makes the file and returns its descriptor.
        rank: this rank's index among those that share the file.
        exchange: the collective ``exchange(object) -> list`` over exactly these ranks.
        field: the option or variable that says which ranks share a node; errors name it.

    Raises:
        InputError: the file cannot be made, or a rank cannot open it. Raised on every rank.
    """
    own = error = None
    if rank == 0:
        try:
            own = make()
        except (InputError, OSError) as refused:
            error = str(refused)
    pid, handle, identity, error = exchange((os.getpid(), own, own is not None and _identity(own), error))[0]
    if error is not None:
        raise InputError(error)
    descriptor, failed = own, None
    if own is None:
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR)
            if _identity(descriptor) != identity:  # in another process namespace the same pid is another process
                failed = "it is another file"
        except OSError as error:
            failed = error.strerror
    if (failure := agreed_failure(failed, exchange)) is not None:  # also keeps the file open until all have opened it
        if descriptor is not None:
            os.close(descriptor)
        raise InputError(
            f"memory of process {pid} cannot be shared: {failure}; ranks of one node must have consecutive numbers "
            "(srun: --distribution=block) and share a process namespace and a user",
            field=field,
        )
    assert descriptor is not None
    return descriptor, pid


def agreed_failure(failed: str | None, exchange: Callable[[object], list]) -> str | None:
    """The failure of the first rank that has one, so that all ranks fail alike, or None; collective.

    Args:
        failed: the failure of this rank, or None.
    """
    return next((text for text in exchange(failed) if text is not None), None)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
