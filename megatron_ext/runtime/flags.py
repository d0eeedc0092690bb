"""Flags: 8-byte words in page-locked memory in which streams, threads and processes store their progress.

[Note: Who waits for which flag]
A CUDA call may hold the driver's lock until a stream is done. A stream that waits for a flag which a thread has to
store may then deadlock: the thread may need the driver or the interpreter, whose locks are held meanwhile. So there are
two kinds of flags. A :class:`DeviceFlag` is stored by a stream; streams wait for it, and threads may poll it. A
:class:`HostFlag` is stored by a thread, of this process or another. The issuing thread polls it and issues what comes
next (issuer.py), other threads poll it, and no stream ever waits for it.
Every rank queues the stores of a version before its waits for that version. So streams that wait for each other's flags
make progress even if all streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``).

[Note: Order of stores]
A rank copies data and then stores a flag; another rank loads the flag and then reads the data. The reader must not see
the flag without the data. Aligned 8-byte stores and loads are atomic on both architectures; their order differs:

* x86-64 keeps the order of stores and the order of loads (total store order), so plain ones suffice. Streaming stores
  are the exception; the C library's ``memcpy``, which uses them for large blocks, ends with a fence.
* aarch64 (GH200, GB200) and others keep neither. There every flag is stored with release order and loaded with acquire
  order, by ``__atomic_store_8`` and ``__atomic_load_8`` of libatomic, a part of GCC's runtime.
* A stream stores a flag after everything queued before it, and all devices see the flag after those writes.
  Source: CUDA driver API, cuStreamWriteValue64.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.worker import Exiting, exiting

LINE = 64
"""Bytes of one flag: a cache line, so that ranks do not disturb each other's flags."""

RELAXED, ACQUIRE, RELEASE = 0, 2, 3
"""Memory orders, as GCC numbers them (``__ATOMIC_RELAXED``, ``__ATOMIC_ACQUIRE``, ``__ATOMIC_RELEASE``)."""

SPINS = 200
"""Polls that only yield the processor; after these, the poller sleeps between polls."""

SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 20e-6, 500e-6
"""Shortest and longest sleep between two polls: a tenth of the time waited so far. The issuing thread sleeps the least:
every poll of another thread takes the interpreter's lock from it."""

LOOK_SECONDS = 0.1
"""Seconds between two checks, during a wait, that whatever stores the flag is still alive."""


def poll(ready: Callable[[], bool], check: Callable[[], None] = lambda: None, turn: Callable[[], None] | None = None):
    """Block the calling thread, not the interpreter, until ``ready()``.

    Args:
        check: called from time to time; raises if the flag will never be stored.
        turn: called between two polls.

    Raises:
        Exiting: the process is about to end.
    """
    for _ in range(SPINS):
        if ready():
            return
        if turn is not None:
            turn()
        os.sched_yield()
    begin = checked = now = time.monotonic()
    while not ready():
        longest = SLEEP_SECONDS if turn is not None else LONGEST_SLEEP_SECONDS
        time.sleep(min(max((now - begin) / 10, SLEEP_SECONDS), longest))
        if turn is not None:
            turn()
        if exiting():
            raise Exiting("the process ended while a thread waited for a flag")
        now = time.monotonic()
        if now - checked > LOOK_SECONDS:
            checked = now
            check()


class OrderedFlags:
    """``rows`` x ``ranks`` words of int64, with plain stores and loads: for machines that keep their order (x86-64).

    Args:
        buffer: writable, at least :func:`flags_bytes` long, aligned to 8 bytes, zero at first.
    """

    def __init__(self, buffer, rows: int, ranks: int):
        words = np.frombuffer(buffer, dtype=np.int64, count=flags_bytes(rows, ranks) // 8)
        self._flags, self._start = words.reshape(rows, ranks, LINE // 8)[:, :, 0], words.ctypes.data
        assert self._start % 8 == 0, self._start

    def store(self, row: int, rank: int, value: int) -> None:
        """Store ``value``; a thread that loads it also sees everything that this thread wrote before."""
        self._flags[row, rank] = value

    def load(self, row: int, rank: int) -> int:
        """The value; from now on, everything that its thread wrote before storing it is visible."""
        return int(self._flags[row, rank])

    def address(self, row: int, rank: int) -> int:
        """The flag's address in this process's memory."""
        return self._start + (row * self._flags.shape[1] + rank) * LINE


class AtomicFlags(OrderedFlags):
    """Stores with release order and loads with acquire order, through libatomic; for every machine.

    Raises:
        InputError: libatomic is not installed.
    """

    def __init__(self, buffer, rows: int, ranks: int):
        super().__init__(buffer, rows, ranks)
        library = _libatomic()
        self._store, self._load = library["__atomic_store_8"], library["__atomic_load_8"]
        self._store.argtypes, self._store.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None
        self._load.argtypes, self._load.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int64

    def store(self, row: int, rank: int, value: int) -> None:
        self._store(self.address(row, rank), value, RELEASE)

    def load(self, row: int, rank: int) -> int:
        return self._load(self.address(row, rank), ACQUIRE)


def flags_bytes(rows: int, ranks: int) -> int:
    """Bytes that ``rows`` x ``ranks`` flags take."""
    return rows * ranks * LINE


def keeps_store_order() -> bool:
    """Whether other processors see this machine's plain stores in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64")


def open_flags(buffer, rows: int, ranks: int) -> OrderedFlags:
    """Flags at the start of ``buffer``, of the class that this machine needs. Raises InputError as
    :class:`AtomicFlags`."""
    return (OrderedFlags if keeps_store_order() else AtomicFlags)(buffer, rows, ranks)


def _libatomic() -> ctypes.PyDLL:
    try:
        return ctypes.PyDLL("libatomic.so.1")  # PyDLL keeps the interpreter's lock: a call takes only nanoseconds
    except OSError:
        raise InputError(
            "host copies on this machine need libatomic.so.1: install the package libatomic1 (Debian, Ubuntu) or "
            "libatomic (Red Hat)",
            field="platform",
            value=platform.machine(),
        ) from None


class Flag:
    """One word. Its value only grows, or becomes negative if its writer has failed."""

    __slots__ = ("_memory", "row", "rank", "device_address")

    def __init__(self, memory: OrderedFlags, row: int, rank: int, offset: int = 0):
        self._memory, self.row, self.rank = memory, row, rank
        self.device_address = memory.address(row, rank) + offset

    def load(self) -> int:
        return self._memory.load(self.row, self.rank)

    def reached(self, value: int) -> bool:
        return self._memory.load(self.row, self.rank) >= value

    def store(self, value: int) -> None:
        """Store from the CPU, after everything that this thread has written."""
        self._memory.store(self.row, self.rank, value)


class DeviceFlag(Flag):
    """Stored by a stream, see [Note: Who waits for which flag]."""


class HostFlag(Flag):
    """Stored by a thread, see [Note: Who waits for which flag]."""


def private_flags(count: int, device: Any) -> list[DeviceFlag]:
    """Flags of this process alone, in memory that ``device`` has page-locked."""
    import torch

    words = device.host_tensor(flags_bytes(count, 1), torch.uint8)
    memory, offset = open_flags(words.numpy(), count, 1), device.address_offset(words)
    return [DeviceFlag(memory, row, 0, offset) for row in range(count)]
