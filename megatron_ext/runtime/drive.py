"""A file without a name on a drive, read past the page cache; for training and for measuring.

[Note: Direct reads, buffered writes]
Reads use ``O_DIRECT``: they get the full rate of the drive and leave the page cache to other programs; memory,
offsets and lengths are multiples of :data:`BLOCK`. Writes go through the page cache, because
shards end anywhere, and are flushed to the drive before they count as published. The kernel
keeps the two coherent on one machine (open(2), "O_DIRECT").

The file has no name (``O_TMPFILE``): its blocks are freed when the last process that holds it
ends, for whatever reason. Other processes open it as /proc/<pid>/fd/<fd>.

[Note: Blocks in flight]
``queue_depth`` threads move blocks of ``block_bytes`` each, so that many requests lie in the drive's queue. The threads
release the interpreter's lock meanwhile. Blocks begin in the order in which they were submitted, and end in any order.
The threads are daemons: they still move blocks while a process ends, and a drive that hangs does not block its exit.
An executor of concurrent.futures would take no new work at exit, and would wait for the work that it has.
"""

import errno
import mmap
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.worker import Transfer, guarded, tell_watch
from megatron_ext.workload.drive_reads import SECTOR_BYTES, DriveReads

BLOCK = SECTOR_BYTES
"""Alignment that every drive takes for direct reads."""

OPTION = "--user-defined-schedule-nvme-path"

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


class DriveError(RuntimeError):
    """A read or write of a group's file failed in the middle of training."""


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK) * BLOCK


def filesystem(directory) -> str:
    """The type of the file system that ``directory`` is on, as the kernel names it."""
    where, found = os.path.realpath(directory), ("", "unknown")
    with open("/proc/mounts") as mounts:
        for line in mounts:
            _, mount, kind, *_ = line.split()
            mount = mount.replace("\\040", " ")
            if (where == mount or where.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(found[0]):
                found = (mount, kind)
    return found[1]


def refuse_no_drive(directory, option: str = OPTION, *, memory: bool = False) -> None:
    """Raises InputError if the directory does not exist, is not writable, or lies in memory and ``memory`` is False.

    Args:
        option: the option that gave the directory.
    """
    if not os.path.isdir(directory):
        raise InputError("is not a directory", field=option, value=str(directory))
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InputError("cannot be written: read-only, or no permission", field=option, value=str(directory))
    if not memory and (kind := filesystem(directory)) in MEMORY_FILESYSTEMS:
        raise InputError(f"is on {kind}, which is memory, not a drive", field=option, value=str(directory))


def create_file(directory, size_bytes: int, *, option: str = OPTION, memory: bool = False) -> int:
    """Descriptor of a new nameless file of ``size_bytes``, whose blocks are reserved.

    Args:
        option: the option that gave the directory; errors name it.
        memory: also accept a directory that lies in memory.

    Raises:
        InputError: there is no such directory, it is not on a drive, not writable, or has not enough free space.
    """
    refuse_no_drive(directory, option, memory=memory)
    where, descriptor = dict(field=option, value=str(directory)), None
    try:
        descriptor = _unnamed(directory)
        os.fchmod(descriptor, 0o600)
        _check_room(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(f"the drive is full: {size_bytes} bytes are needed", **where) from None
        raise InputError(f"cannot be written: {error.strerror}", **where) from None
    return descriptor


def _check_room(descriptor: int, size_bytes: int) -> None:
    """A reservation that is too large takes all free space before it fails, and other writers fail meanwhile."""
    drive = os.fstatvfs(descriptor)
    blocks = drive.f_bfree if os.geteuid() == 0 else drive.f_bavail
    if drive.f_blocks and size_bytes > blocks * drive.f_frsize:  # some network file systems report no blocks
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unnamed(directory) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    descriptor, path = tempfile.mkstemp(prefix=".megatron_ext.", dir=directory)
    os.unlink(path)
    return descriptor


def open_own(directory, size_bytes: int, settings: DriveReads) -> "DriveFile":
    """A new nameless file of this process alone. Raises InputError as :func:`create_file` does."""
    return open_file(create_file(directory, size_bytes), os.getpid(), directory, settings)


def open_file(descriptor: int, pid: int, directory, settings: DriveReads) -> "DriveFile":
    """The nameless file that process ``pid`` has made in ``directory``. Raises InputError like :class:`DriveFile`."""
    return DriveFile(descriptor, f"the file of process {pid} in {directory}", settings)


class DriveFile:
    """One process's access to a nameless file.

    Args:
        descriptor: of the file; this object closes it, even if the file is refused.
        label: the name of the file in errors.
        settings: how to read; blocks are multiples of :data:`BLOCK`.
        need_direct: refuse a file system without direct reads; otherwise what was read
            is dropped from the page cache.

    Attributes:
        direct: whether reads bypass the page cache.
        descriptor: for access through the page cache.

    Raises:
        InputError: the file cannot be opened for direct reads.
    """

    def __init__(self, descriptor: int, label: str, settings: DriveReads, *, need_direct: bool = True):
        self.label, self.direct, self.descriptor = label, True, descriptor
        path = f"/proc/self/fd/{descriptor}"  # opening it opens the file a second time
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if need_direct:
                os.close(descriptor)
                why = f"cannot be read without the page cache: {error.strerror}"
                raise InputError(why, field=OPTION, value=label) from None
            self.direct = False
            self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.block_bytes, self.queue_depth = settings.block_bytes, settings.queue_depth
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._movers = _Movers(self.queue_depth)

    def configure(self, block_bytes: int, queue_depth: int) -> None:
        """Change the size of requests and how many are in flight. Not allowed during a read."""
        self._movers.close()
        self.block_bytes, self.queue_depth = block_bytes, queue_depth
        self._movers = _Movers(queue_depth)

    def start(
        self, memory: memoryview, offset: int, what: str, transfer: Transfer, before_end=None, *, write: bool = False
    ) -> None:
        """Begin to fill ``memory`` (aligned, a multiple of BLOCK) from ``offset``, behind reads that began before.
        With ``write``, begin to write ``memory`` there past the page cache; it must not change until ``transfer`` ends.

        Another thread finishes ``transfer`` when all bytes have moved, or with a DriveError that names ``what`` and the
        file. It calls ``before_end()`` just before.
        """
        _Move(self, memory, offset, what, transfer, before_end, write).begin()

    def read(self, memory: memoryview, offset: int, what: str) -> None:
        """Like :meth:`start`, but block until the bytes are there.

        Raises:
            DriveError: naming ``what`` and the file.
        """
        transfer = Transfer()
        self.start(memory, offset, what, transfer)
        transfer.wait()

    def map(self, offset: int, size_bytes: int, what: str) -> memoryview:
        """The bytes at ``offset`` as memory that the system may reclaim; changes to it do not reach the file. The file
        must not change while the memory is read. ``offset``: a multiple of BLOCK.

        Raises:
            DriveError: naming ``what`` and the file.
        """
        scratch = bytearray(min(size_bytes, 1 << 20))
        for start in range(0, size_bytes, len(scratch)):  # an unreadable page of the mapping would end the process
            wanted = memoryview(scratch)[: size_bytes - start]
            try:
                count = os.preadv(self.descriptor, [wanted], offset + start)
                if count == len(wanted):
                    continue
                why = f"ends at byte {offset + start + count}"
            except OSError as error:
                why = f"cannot be read at byte {offset + start}: {error.strerror}"
            raise DriveError(f"{what}: {self.label} {why}")
        before = offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self.descriptor, before + size_bytes, offset=offset - before, access=mmap.ACCESS_COPY)
        return memoryview(mapped)[before:]

    def write(self, memory, offset: int, what: str) -> None:
        """Write ``memory`` at ``offset`` through the page cache; :meth:`flush` brings it to the drive.

        Raises:
            DriveError: naming ``what`` and the file.
        """
        memory, done = memoryview(memory).cast("B"), 0
        try:
            while done < len(memory):
                done += os.pwrite(self.descriptor, memory[done:], offset + done)
        except OSError as error:
            why = "the drive is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise DriveError(f"{what}: {self.label} cannot be written at byte {offset + done}: {why}") from None

    def flush(self, offset: int, size_bytes: int, what: str) -> None:
        """Flush a range of the file to the drive and drop it from the page cache. Raises DriveError."""
        try:
            os.fdatasync(self.descriptor)
            os.posix_fadvise(self.descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise DriveError(f"{what}: {self.label} cannot be flushed: {error.strerror}") from None

    def end_transfers(self) -> None:
        """Wait for all transfers that have begun. Afterwards only :meth:`map` works, until :meth:`close` or until
        this object is freed."""
        self._movers.close()
        os.close(self._direct)

    def close(self) -> None:
        self.end_transfers()
        self._close()


class _Movers:
    """``number`` threads that run the submitted calls, begun in order; see [Note: Blocks in flight]. They start with
    the file, which may be read while the process ends: Python starts no thread then."""

    def __init__(self, number: int):
        self._calls = queue.SimpleQueue()
        self.submit = self._calls.put
        self._moving = [
            threading.Thread(target=guarded(_call_all), args=(self._calls,), name="megatron_ext-drive", daemon=True)
            for _ in range(number)
        ]
        self._end = weakref.finalize(self, _end_all, number, self._calls)
        self._end.atexit = False
        for thread in self._moving:
            thread.start()

    def close(self) -> None:
        """Wait until all submitted calls have ended."""
        self._end()
        for thread in self._moving:
            thread.join()


def _call_all(calls: queue.SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        call()


def _end_all(number: int, calls: queue.SimpleQueue) -> None:
    for _ in range(number):
        calls.put(None)


@dataclass(eq=False)
class _Move:
    """One read or write of contiguous bytes, see [Note: Blocks in flight]."""

    file: DriveFile
    memory: memoryview
    offset: int
    what: str
    transfer: Transfer
    before_end: Callable[[], None] | None
    is_write: bool

    def begin(self) -> None:
        starts = range(0, len(self.memory), self.file.block_bytes)
        self._lock, self._left, self._error = threading.Lock(), len(starts), None
        for start in starts:
            self.file._movers.submit(partial(guarded(self._move_block), start))

    # On the threads.

    def _move_block(self, start: int) -> None:
        try:
            self._end_block(self._moved(start, min(start + self.file.block_bytes, len(self.memory))))
        except BaseException as error:  # nothing else would end the transfer
            self.transfer.finish(error)
            raise

    def _moved(self, start: int, end: int) -> str | None:
        """Move the bytes from ``start`` to ``end``; returns the error as text, or None."""
        while start < end:
            try:
                count = request(self.file._direct, self.memory[start:end], self.offset + start, self.is_write)
            except OSError as error:
                verb = "written" if self.is_write else "read"
                return f"cannot be {verb} at byte {self.offset + start}: {error.strerror}"
            start += count
            if start < end and (count == 0 or count % BLOCK):
                return f"ends at byte {self.offset + start}, {len(self.memory) - start} bytes too early"
        return None

    def _end_block(self, error: str | None) -> None:
        with self._lock:
            if error is not None and self._error is None:
                self._error = DriveError(f"{self.what}: {self.file.label} {error}")
            self._left -= 1
            if self._left:
                return
        if not self.file.direct:  # otherwise the next read would come from the page cache
            os.posix_fadvise(self.file._direct, self.offset, len(self.memory), os.POSIX_FADV_DONTNEED)
        if self.before_end is not None:
            self.before_end()
        self.transfer.finish(self._error)
        if self._error is not None:
            tell_watch(self._error)


def request(descriptor: int, memory: memoryview, offset: int, write: bool) -> int:
    """Fill ``memory`` from ``offset``, or write it there; returns the bytes that were moved. Raises OSError."""
    return (os.pwritev if write else os.preadv)(descriptor, [memory], offset)
