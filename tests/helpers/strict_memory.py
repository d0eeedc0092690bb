"""Where bytes lie, for the strict stand-in: host memory by regions, everything else on the device.

Memory that processes share has one name in all of them, by the inode of its mapping.
"""

import bisect
import ctypes
import itertools
import threading
import weakref

import torch
from strict_engine import frame_here, where

POISON = 0x7F

CALLS_LAYERS = "/boundaries.py"  # of the package: what they take is the model's


def tensors_in(value):
    """Tensors in an argument, or a result, of torch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


class Region:
    """Host memory: its first byte is byte ``start`` of what ``key`` names."""

    def __init__(self, begin: int, end: int, key: tuple, start: int, locked: bool):
        self.begin, self.end, self.key, self.start, self.locked = begin, end, key, start, locked
        self.registered = self.by_kernel = False  # by a call of the driver's; and whether a kernel has been given it


class Pool:
    """In place of a pool of device memory."""

    alive = weakref.WeakSet()

    def __init__(self):
        self.alive.add(self)


class Memory:
    """All memory that one rank has told of.

    Args:
        error: is told what is wrong.
        no_room: a file of the package, for which the device has no memory; empty: it has for all.
    """

    def __init__(self, rank: int, error, no_room: str = ""):
        self.rank, self._error, self._no_room = rank, error, no_room
        self.given_back = lambda region: None  # called with page-locked memory of torch's that a kernel has been given
        self._serial = itertools.count()
        self._changing, self._table = threading.RLock(), ([], [])  # begins, regions; replaced as one
        self._blocks: dict[int, tuple] = {}  # block of a storage that comes and goes, by its ``_cdata``
        self._free: dict[tuple, list[tuple]] = {}  # by stream and size
        self._taken_on: dict[tuple, str] = {}  # stream for which a block was taken: it goes back to this one's
        self._kept: list = []
        self.made_on: dict[int, str] = {}  # stream on which a storage was allocated, by its address
        self.begun = self.in_steps = False  # whether an iteration has begun; and its last step has not ended

    def check_time(self, late: bool, what: str) -> None:
        """The package takes, or gives back, memory in a way that may wait for the device: not ``late``."""
        name = "" if (frame := frame_here()) is None else frame.f_code.co_filename
        if late and "/megatron_ext/" in name and not name.endswith(CALLS_LAYERS):
            self._error(f"{what} within an iteration, at {where()}")

    def made(self, base: int, stream: str, operation: str) -> None:
        """A new storage lies at ``base``. Raises torch.cuda.OutOfMemoryError."""
        if base and self._no_room and where().startswith(f"{self._no_room}:"):
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory, at {where()}")
        self.made_on[base] = stream
        self.check_time(self.in_steps, f"device memory of {operation}")

    def region(self, address: int) -> Region | None:
        begins, regions = self._table
        number = bisect.bisect_right(begins, address) - 1
        return regions[number] if number >= 0 and address < regions[number].end else None

    def add_host(self, begin: int, size: int, locked: bool = False, owner=None, mapped: bool = True) -> None:
        """``size`` bytes at ``begin`` are host memory, until ``owner`` dies. ``mapped``: others may share it."""
        self.check_time(locked and self.begun, "page-locked memory")
        with self._changing:
            region = self.region(begin)
            if region is not None:
                whole = begin <= region.begin and begin + size >= region.end
                region.locked, region.end = region.locked or (locked and whole), max(region.end, begin + size)
                return
            shared = _shared_mapping(begin) if mapped else None
            key, start = shared if shared is not None else ((self.rank, "host", next(self._serial)), 0)
            begins, regions = map(list, self._table)
            at = bisect.bisect(begins, begin)
            begins.insert(at, begin)
            regions.insert(at, Region(begin, begin + size, key, start, locked))
            self._table = begins, regions
        try:
            weakref.finalize(owner, self._drop, begin).atexit = False
        except TypeError:  # it knows no weak references
            self._kept.append(owner)

    def _drop(self, begin: int) -> None:
        with self._changing:
            begins, regions = map(list, self._table)
            at = bisect.bisect_left(begins, begin)
            if at < len(begins) and begins[at] == begin:
                if regions[at].by_kernel and regions[at].locked and not regions[at].registered:
                    self.given_back(regions[at])
                if regions[at].registered:
                    self._error("host memory that the driver has page-locked is given back")
                del begins[at], regions[at]
                self._table = begins, regions

    def to_host(self, tensor: torch.Tensor, locked: bool = False) -> torch.Tensor:
        """``tensor``, whose storage lies in host memory from now on."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.add_host(storage.data_ptr(), storage.nbytes(), locked, storage, mapped=False)
        return tensor

    def name_of(self, address: int) -> tuple:
        """A flag's name, the same in all processes that map it."""
        region = self.region(address)
        if region is None:
            return _shared_mapping(address) or (self.rank, address)
        return region.key, region.start + address - region.begin

    def place(self, tensor: torch.Tensor, label: str) -> tuple | None:
        """``(key, begin, end)`` of the bytes of ``tensor``; None where it has none."""
        if tensor.numel() == 0:
            return None
        size = tensor.element_size()
        span = (1 + sum((n - 1) * abs(stride) for n, stride in zip(tensor.shape, tensor.stride()))) * size
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is not None:
            if storage.nbytes() == 0:
                self._error(f"freed memory is used by {label}")
                return None
            begin = tensor.storage_offset() * size
            return block, begin, begin + span
        begin = tensor.data_ptr()
        region = self.region(begin)
        if region is not None:
            begin += region.start - region.begin
            return region.key, begin, begin + span
        base = storage.data_ptr()
        return (self.rank, "memory", base, self.made_on.get(base)), begin - base, begin - base + span

    def place_of_buffer(self, buffer, label: str) -> tuple:
        """The same of host memory that a drive is given."""
        array = hasattr(buffer, "ctypes")
        address = buffer.ctypes.data if array else ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        size = buffer.nbytes if hasattr(buffer, "nbytes") else len(buffer)
        key, start = self.name_of(address)
        if self.region(address) is None:
            self._error(f"{label} is given device memory")
        return key, start, start + size

    def on_device(self, storage) -> bool:
        return storage._cdata in self._blocks or self.region(storage.data_ptr()) is None

    def resize(self, storage, size: int, stream: str, resize) -> tuple[tuple, bool]:
        """``resize(size)`` of a device's storage, which has a block for as long as it has bytes. Freed blocks are taken
        by the next that asks for as many bytes on the same stream.

        Returns:
            The block, and whether no freed one was found.
        """
        known, had = self._blocks.get(storage._cdata), storage.nbytes()
        resize(size)  # torch refuses where there is a NumPy array of it
        if known is None:
            self._kept.append(storage)  # its number stays its own
            known = self._blocks[storage._cdata] = self._new_block()
        if had:
            self._free.setdefault((self._taken_on.get(known, "default stream"), had), []).append(known)
        if not size:
            return known, False
        free = self._free.get((stream, size), [])
        found = bool(free)
        block = self._blocks[storage._cdata] = free.pop() if found else self._new_block()
        self._taken_on[block] = stream
        self.check_time(self.in_steps and not found, "a new block of device memory")
        ctypes.memset(storage.data_ptr(), POISON, size)
        return block, not found

    def _new_block(self) -> tuple:
        return self.rank, "block", next(self._serial)


def _shared_mapping(address: int) -> tuple | None:
    """``(name, byte)`` of memory that processes can share; None where they cannot."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, offset, device, inode, *_ = line.split()
            begin, end = (int(one, 16) for one in span.split("-"))
            if begin <= address < end:
                shared = "s" in rights and inode != "0"
                return (("shared", device, inode), int(offset, 16) + address - begin) if shared else None
    return None
