"""Locks a run's directory, so that one process uses it at a time. scripts/pretrain_gpt_hybrid.sh locks its directory in
the same way."""

import errno
import fcntl
import os
from pathlib import Path

from megatron_ext.formats.errors import InputError

NAME = ".lock"
"""File in the directory that is locked with flock(2). It holds the id of the process that locked it last."""

_held: set[str] = set()


def hold(directory, *, field: str) -> None:
    """Lock ``directory`` for this process until the process ends.

    Args:
        field: the option that named the directory.

    Raises:
        InputError: another run has locked it, as far as the file system can tell, or it cannot be written.
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
        # Lustre mounted without flock and NFS without its lock service take no locks: nothing is locked there.
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise InputError(f"cannot be locked: {error.strerror}", file=path, field=field) from None
    _held.add(os.path.realpath(path))
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
