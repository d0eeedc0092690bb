"""Flags in memory that several processes map: a store releases, a load acquires.

[Note: Order of stores]
A rank copies data and then stores a flag; another loads the flag and then reads the data. The reader must not see
the flag without the data. Aligned 8-byte stores and loads are whole on both machines; their order differs:

* x86-64 keeps the order of stores and the order of loads (total store order), so plain ones suffice. Streaming stores
  are the exception; the C library's ``memcpy``, which uses them for large blocks, ends with a fence.
* aarch64 (GH200, GB200) and others keep neither. There every flag is stored with release order and loaded with acquire
  order, by ``__atomic_store_8`` and ``__atomic_load_8`` of libatomic, a part of GCC's runtime.
"""

import ctypes
import platform
from typing import Protocol

import numpy as np

from megatron_ext.formats.errors import InputError

LINE = 64
"""Bytes of one flag: a cache line, so that ranks do not disturb each other's flags."""

RELAXED, ACQUIRE, RELEASE = 0, 2, 3
"""Memory orders, as GCC numbers them (``__ATOMIC_RELAXED``, ``__ATOMIC_ACQUIRE``, ``__ATOMIC_RELEASE``)."""


class SharedFlags(Protocol):
    """``rows`` x ``ranks`` flags of int64."""

    def store(self, row: int, rank: int, value: int) -> None:
        """Store ``value``; who loads it also sees everything that this thread wrote before."""
        ...

    def load(self, row: int) -> np.ndarray:
        """The flags of all ranks in ``row``, int64 of shape ``(ranks,)``; not to be written to."""
        ...

    def address(self, row: int, rank: int) -> int:
        """Where the flag lies in this process's memory."""
        ...


class OrderedFlags:
    """Plain stores and loads, for machines that keep their order (x86-64).

    Args:
        buffer: writable, at least :func:`flags_bytes` long, aligned to 8 bytes, zero at first.
    """

    def __init__(self, buffer, rows: int, ranks: int):
        words = np.frombuffer(buffer, dtype=np.int64, count=flags_bytes(rows, ranks) // 8)
        self._flags, self._start = words.reshape(rows, ranks, LINE // 8)[:, :, 0], words.ctypes.data

    def store(self, row: int, rank: int, value: int) -> None:
        self._flags[row, rank] = value

    def load(self, row: int) -> np.ndarray:
        return self._flags[row]

    def address(self, row: int, rank: int) -> int:
        return self._start + (row * self._flags.shape[1] + rank) * LINE


class AtomicFlags:
    """Stores with release and loads with acquire order, by libatomic; for every machine.

    Raises:
        InputError: libatomic is not installed.
    """

    def __init__(self, buffer, rows: int, ranks: int):
        library = _libatomic()
        self._store, self._load = library["__atomic_store_8"], library["__atomic_load_8"]
        self._store.argtypes, self._store.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None
        self._load.argtypes, self._load.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int64
        self._memory = (ctypes.c_char * flags_bytes(rows, ranks)).from_buffer(buffer)  # keeps the mapping alive
        self._ranks, self._start = ranks, ctypes.addressof(self._memory)
        assert self._start % 8 == 0, self._start

    def store(self, row: int, rank: int, value: int) -> None:
        self._store(self.address(row, rank), value, RELEASE)

    def load(self, row: int) -> np.ndarray:
        return np.array([self._load(self.address(row, rank), ACQUIRE) for rank in range(self._ranks)], dtype=np.int64)

    def address(self, row: int, rank: int) -> int:
        return self._start + (row * self._ranks + rank) * LINE


def flags_bytes(rows: int, ranks: int) -> int:
    """Bytes that ``rows`` x ``ranks`` flags take."""
    return rows * ranks * LINE


def keeps_store_order() -> bool:
    """Whether this machine shows other processors plain stores in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64")


def open_flags(buffer, rows: int, ranks: int) -> SharedFlags:
    """Flags at the beginning of ``buffer``, by what this machine needs. Raises InputError as :class:`AtomicFlags`."""
    return (OrderedFlags if keeps_store_order() else AtomicFlags)(buffer, rows, ranks)


def _libatomic() -> ctypes.PyDLL:
    try:
        return ctypes.PyDLL("libatomic.so.1")  # holds the interpreter's lock: a call takes some nanoseconds
    except OSError:
        raise InputError(
            "host copies on this machine need libatomic.so.1: install the package libatomic1 (Debian, Ubuntu) or "
            "libatomic (Red Hat)",
            field="platform",
            value=platform.machine(),
        ) from None
