"""Faults of a drive: what the kernel says of a request is replaced, where drives are read and written."""

import errno
import itertools
import os
import signal

from megatron_ext.runtime import drive

READ, WRITE = False, True


def _killed(count: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return count


FAULTS = {
    "read error": (READ, lambda count: -errno.EIO, "cannot be read at byte .*: Input/output error"),
    "short read": (READ, lambda count: count // 2 + 1, "ends at byte .*, .* bytes too early"),
    "write error": (WRITE, lambda count: -errno.EIO, "cannot be written at byte .*: Input/output error"),
    "full drive": (WRITE, lambda count: -errno.ENOSPC, "cannot be written at byte .*: No space left on device"),
    "short write": (WRITE, lambda count: count // 2 + 1, "ends at byte .*, .* bytes too early"),
    "killed": (WRITE, _killed, ""),
}
"""By name: which requests, what becomes of the number of bytes that they have moved, and what is said of it."""


def install(fault: str, number: int, setattr=setattr) -> None:
    """Let the ``number``-th request of its kind in this process, from 0, meet a fault; ``setattr``: how to replace."""
    write, change, _ = FAULTS[fault]
    replace_results(lambda index, count: change(count) if index == number else count, write, setattr)


def replace_results(changed, write: bool, setattr=setattr) -> None:
    """``changed(index, count)`` is told for the result of every request of one direction; below 0: an error's number,
    which is raised."""
    numbers, request = itertools.count(), drive.request

    def altered(descriptor: int, memory: memoryview, offset: int, is_write: bool) -> int:
        count = request(descriptor, memory, offset, is_write)
        if is_write == write and (count := changed(next(numbers), count)) < 0:
            raise OSError(-count, os.strerror(-count))
        return count

    setattr(drive, "request", altered)
