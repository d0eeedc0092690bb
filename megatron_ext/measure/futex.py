"""Sleep until another process changes a word of memory that both map.

Source: futex(2). Of the standard library only ``multiprocessing`` has anything like it, and its semaphores
belong to processes that it started itself.
"""

import ctypes
import errno
import os
import platform

_CALLS = {"x86_64": 202, "aarch64": 98}
"""Number of the system call, by machine. Linux alone."""

_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Futex:
    """The word at ``memory[0]``: int64, of which the kernel compares the lower 32 bits.

    Args:
        memory: one int64, in shared memory; other processes make a Futex of the same word.

    Raises:
        OSError: the machine has no futex that we know of.
    """

    def __init__(self, memory: memoryview):
        assert memory.format == "q" and len(memory) == 1
        if platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, f"no futex known for {platform.machine()}")
        self._number = _CALLS[platform.machine()]
        self._word = ctypes.c_int64.from_buffer(memory)
        self._address = ctypes.addressof(self._word)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    @property
    def value(self) -> int:
        """The word as it is now (64 bits, signed)."""
        return self._word.value

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep while the value is ``seen``, for ``seconds`` at most. May return early."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        self._call(_WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit))

    def wake(self, value: int) -> None:
        """Set the value and wake everyone who sleeps by it."""
        self._word.value = value
        self._call(_WAKE, _EVERYONE, None)

    def _call(self, operation: int, value: int, limit) -> None:
        done = self._syscall(
            ctypes.c_long(self._number),
            ctypes.c_void_p(self._address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            limit,
            ctypes.c_void_p(None),
            ctypes.c_int(0),
        )
        failure = ctypes.get_errno()
        if done < 0 and failure not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(failure, f"futex: {os.strerror(failure)}")
