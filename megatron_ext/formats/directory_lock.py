"""A run's directory belongs to one process at a time; scripts/pretrain_gpt_hybrid.sh holds its own in the same way."""

import errno
import fcntl
import os
from pathlib import Path

from megatron_ext.formats.errors import InputError

NAME = ".lock"
"""File in the directory that is locked (flock(2)); it holds the number of the process that has locked it last."""

_held: set[str] = set()


def hold(directory, *, field: str) -> None:
    """Hold ``directory`` for this process until it ends.

    Raises:
        InputError: another run uses it, as far as the file system knows, or it cannot be written; ``field`` is the
            option by which it was given.
    """
    path = Path(directory) / NAME
    if os.path.realpath(path) in _held:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # left open: the lock goes with it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"is in use by process {path.read_text().strip()}"
        raise InputError(text, field=field, value=str(directory)) from None
    except OSError as error:
        # Lustre that is not mounted for it takes no locks, nor does NFS without its service: nothing is held there.
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise InputError(f"cannot be locked: {error.strerror}", file=path, field=field) from None
    _held.add(os.path.realpath(path))
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
