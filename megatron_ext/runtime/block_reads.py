"""Reads and writes of blocks in flight at once: by the kernel's asynchronous I/O, or by threads where it has none.

[Note: Why the kernel's interface]
A thread that waits for its read needs a processor to come back and give the next one to the drive,
and a processor is what training leaves least of. With io_submit(2) all requests lie in the
kernel's queue: the drive goes on by itself, and one thread collects what is done.
"""

import contextlib
import ctypes
import errno
import os
import platform
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from megatron_ext.runtime.worker import guarded, report_failure

SYSTEM_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""io_setup, io_destroy, io_getevents, io_submit (asm/unistd.h)."""

READ, WRITE = 0, 1
"""IOCB_CMD_PREAD and IOCB_CMD_PWRITE (linux/aio_abi.h)."""


class Request(NamedTuple):
    """Fill ``view`` from ``offset``, or write it there. Then ``done(result)`` is called on some thread, with the bytes
    moved or a negative error number. ``failed(error)`` is called instead where the request cannot end, and after
    ``done`` has raised."""

    view: memoryview
    offset: int
    done: Callable[[int], None]
    failed: Callable[[BaseException], None]
    write: bool = False


U64, I64 = ctypes.c_uint64, ctypes.c_int64


class _Control(ctypes.Structure):
    """struct iocb (linux/aio_abi.h)."""

    _fields_ = [
        *(("data", U64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int32), ("opcode", ctypes.c_uint16)),
        *(("priority", ctypes.c_int16), ("descriptor", ctypes.c_uint32), ("buffer", U64), ("bytes", U64)),
        *(("offset", I64), ("reserved", U64), ("flags", ctypes.c_uint32), ("event", ctypes.c_uint32)),
    ]


class _Event(ctypes.Structure):
    """struct io_event."""

    _fields_ = [("data", U64), ("control", U64), ("result", I64), ("second", I64)]


class KernelReads:
    """At most ``queue_depth`` requests for ``descriptor`` in the kernel at once, the others in order behind them.

    Raises:
        OSError: the kernel has no asynchronous I/O for us.
    """

    def __init__(self, descriptor: int, queue_depth: int):
        if platform.machine() not in SYSTEM_CALLS:
            raise OSError(errno.ENOSYS, f"no system call numbers for {platform.machine()}")
        self._setup, self._destroy, self._get_events, self._submit = SYSTEM_CALLS[platform.machine()]
        self._system = ctypes.CDLL(None, use_errno=True).syscall
        self._descriptor, self._depth = descriptor, queue_depth
        self._context = ctypes.c_ulong(0)
        self._call(self._setup, ctypes.c_uint(queue_depth), ctypes.byref(self._context))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._untold: dict[int, Request] = {}  # all that were given, until they have been told; by number
        self._pending: deque[int] = deque()
        self._in_kernel: dict[int, tuple] = {}  # what the kernel reads and writes, by number
        self._number, self._closed = 0, False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=guarded(self._run), name="megatron_ext-drive", daemon=True)
        self._thread.start()

    def _call(self, *arguments) -> int:
        result = self._system(*arguments)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def read(self, requests: list[Request]) -> None:
        """Give requests to the drive, behind those given before; returns at once."""
        with self._lock:
            refused = self._broken or (OSError(errno.EIO, os.strerror(errno.EIO)) if self._closed else None)
            if refused is None:
                for request in requests:
                    self._number += 1
                    self._untold[self._number] = request
                    self._pending.append(self._number)
        if refused is not None:
            for request in requests:
                request.failed(refused)
            return
        with self._breaking():
            with self._lock:
                failed = self._fill()
                self._changed.notify()
            self._tell(failed)

    @contextlib.contextmanager
    def _breaking(self):
        """An error in this context fails all requests, those given later as well."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._broken = error
                untold = list(self._untold.values())
                self._untold.clear()
                self._pending.clear()
                self._changed.notify()
            for request in untold:
                request.failed(error)
            raise

    def _fill(self) -> list[tuple[int, int]]:
        """Submit what there is space for; returns what the kernel refused, with the error number as a negative one."""
        free = min(self._depth - len(self._in_kernel), len(self._pending))
        if not free:
            return []
        entries = [self._entry(self._pending.popleft()) for _ in range(free)]
        pointers = (ctypes.c_void_p * free)(*(ctypes.addressof(entry[1]) for entry in entries))
        taken, failed = 0, []
        while taken < free:
            try:
                count = self._call(
                    self._submit,
                    self._context,
                    ctypes.c_long(free - taken),
                    ctypes.byref(pointers, taken * ctypes.sizeof(ctypes.c_void_p)),
                )
            except InterruptedError:
                continue
            except OSError as error:  # of the first that is left
                failed.append((entries[taken][0], -(error.errno or errno.EIO)))
                taken += 1
                continue
            for entry in entries[taken : taken + count]:
                self._in_kernel[entry[0]] = entry
            taken += count
        return failed

    def _entry(self, number: int) -> tuple:
        """What the kernel reads and writes of a request, which must stay until it is done."""
        request = self._untold[number]
        memory = (ctypes.c_char * len(request.view)).from_buffer(request.view)
        control = _Control(
            data=number,
            opcode=WRITE if request.write else READ,
            descriptor=self._descriptor,
            buffer=ctypes.addressof(memory),
            bytes=len(request.view),
            offset=request.offset,
        )
        return number, control, memory

    def _run(self) -> None:
        with self._breaking():
            self._reap()

    def _reap(self) -> None:
        events = (_Event * self._depth)()
        while True:
            with self._lock:
                while not self._in_kernel:
                    if self._closed or self._broken:
                        return
                    self._changed.wait()
            try:
                count = self._call(
                    self._get_events, self._context, ctypes.c_long(1), ctypes.c_long(self._depth), events, None
                )
            except InterruptedError:
                continue
            done = [(event.data, event.result) for event in events[:count]]
            with self._lock:
                for number, _ in done:
                    del self._in_kernel[number]
                done += self._fill()
            self._tell(done)

    def _tell(self, done: list[tuple[int, int]]) -> None:
        """Tell whose reads have ended; each stays known until it has been told."""
        for number, result in done:
            request = self._untold.get(number)
            if request is not None:  # or all have failed meanwhile
                _tell(request, result)
                self._untold.pop(number, None)

    def close(self) -> None:
        """Forget what the kernel does not have yet; returns when it has read the rest."""
        with self._lock:
            left = [self._untold.pop(number) for number in self._pending if number in self._untold]
            self._pending.clear()
            self._closed = True
            self._changed.notify()
        for request in left:  # whoever still waits hears of it; that a run ends before its reads is no failure
            request.failed(OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)))
        self._thread.join()
        self._call(self._destroy, self._context)


def _tell(request: Request, result: int) -> None:
    try:
        request.done(result)
    except Exception as error:  # of one reader: the others must hear of theirs
        request.failed(error)
        report_failure(error)


class ThreadReads:
    """The same by ``queue_depth`` threads."""

    def __init__(self, descriptor: int, queue_depth: int):
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="megatron_ext-drive")

    def read(self, requests: list[Request]) -> None:
        for request in requests:
            self._pool.submit(guarded(self._one), request)

    def _one(self, request: Request) -> None:
        try:
            try:
                move = os.pwritev if request.write else os.preadv
                result = move(self._descriptor, [request.view], request.offset)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            _tell(request, result)
        except BaseException as error:
            request.failed(error)
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def open_reads(descriptor: int, queue_depth: int, direct: bool = True):
    """The kernel's asynchronous reads of ``descriptor``, or threads: where there are none, and for reads
    through the page cache, which the kernel waits for when they are submitted."""
    if not direct:
        return ThreadReads(descriptor, queue_depth)
    try:
        return KernelReads(descriptor, queue_depth)
    except OSError:
        return ThreadReads(descriptor, queue_depth)
