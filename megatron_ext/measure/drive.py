"""A file on the drive, read and written past the page cache.

``O_DIRECT`` needs memory, offsets and lengths in multiples of the drive's block (4096 serves
all); memory comes from mmap, so it is aligned. ``queue_depth`` threads keep as many requests of
``block_bytes`` in flight (``preadv`` and ``pwritev`` release the interpreter). The file has no
name (``O_TMPFILE``): nothing is left on the drive, however the process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

from megatron_ext.errors import InputError

SECTOR = 4096
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def padded(size_bytes: int) -> int:
    return -(-size_bytes // SECTOR) * SECTOR


def filesystem(directory: str) -> str:
    """Kind of the file system that ``directory`` is on, as the kernel names it (Linux)."""
    where, found = os.path.realpath(directory), ("", "unknown")
    try:
        with open("/proc/mounts") as mounts:
            for line in mounts:
                _, mount, kind, *_ = line.split()
                mount = mount.replace("\\040", " ")
                inside = where == mount or where.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(found[0]):
                    found = (mount, kind)
    except OSError:
        pass
    return found[1]


class Drive:
    """A file of ``size_bytes`` in ``directory``, filled with bytes that do not compress.

    Attributes:
        direct: whether the page cache is passed by.

    Raises:
        InputError: the directory is missing, not writable, or the drive is full.
    """

    def __init__(self, directory: str, size_bytes: int, queue_depth: int = 4):
        self.directory, self.size_bytes = directory, padded(size_bytes)
        self._pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="megatron_ext-drive")
        self.queue_depth = queue_depth
        if not os.path.isdir(directory):
            raise InputError("is no directory", file="--nvme-path", value=directory)
        try:
            self._descriptor = _unnamed(directory)
        except OSError as error:
            raise InputError(f"is not writable: {error.strerror}", file="--nvme-path", value=directory) from None
        # /proc/self/fd opens the same nameless file again, with its own flags.
        try:
            flag = os.O_DIRECT
            self._io = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC | flag)
            self.direct = True
        except OSError:
            self._io, self.direct = self._descriptor, False
        try:
            self._fill()
        except OSError as error:
            self.close()
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> InputError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return InputError(f"the drive is full: needs {self.size_bytes} bytes a rank", file="--nvme-path", value=self.directory)
        return InputError(f"cannot be written: {error.strerror}", file="--nvme-path", value=self.directory)

    def _fill(self) -> None:
        stat = os.statvfs(self._descriptor)
        if stat.f_bavail * stat.f_frsize < self.size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        piece = memoryview(mmap.mmap(-1, min(self.size_bytes, 4 << 20)))
        piece[:] = os.urandom(len(piece))
        for offset in range(0, self.size_bytes, len(piece)):
            _whole(os.pwritev, self._io, piece[: self.size_bytes - offset], offset)
        os.fsync(self._descriptor)  # what is still being written would disturb what is read

    def set_queue_depth(self, queue_depth: int) -> None:
        if queue_depth != self.queue_depth:
            self._pool.shutdown()
            self._pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="megatron_ext-drive")
            self.queue_depth = queue_depth

    def read(self, slot: memoryview, offset: int, size_bytes: int, block_bytes: int) -> None:
        """Read into page-aligned ``slot``; returns when all of it is there."""
        self._blocks(os.preadv, slot, offset, size_bytes, block_bytes)
        if not self.direct:  # or the next read would come from the page cache
            os.posix_fadvise(self._io, offset, padded(size_bytes), os.POSIX_FADV_DONTNEED)

    def write(self, slot: memoryview, offset: int, size_bytes: int, block_bytes: int) -> None:
        """Write from page-aligned ``slot``; returns when the drive has taken all of it."""
        self._blocks(os.pwritev, slot, offset, size_bytes, block_bytes)

    def _blocks(self, call, slot: memoryview, offset: int, size_bytes: int, block_bytes: int) -> None:
        size_bytes = padded(size_bytes)
        starts = range(0, size_bytes, block_bytes)

        def one(start: int) -> None:
            _whole(call, self._io, slot[start : min(start + block_bytes, size_bytes)], offset + start)

        if len(starts) == 1:
            one(0)
        else:
            for _ in self._pool.map(one, starts):
                pass

    def close(self) -> None:
        self._pool.shutdown()
        for descriptor in {self._descriptor, self._io} if hasattr(self, "_io") else {self._descriptor}:
            os.close(descriptor)


def _unnamed(directory: str) -> int:
    """A descriptor of a new file without a name."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    descriptor, path = tempfile.mkstemp(prefix=".megatron_ext.", dir=directory)
    os.unlink(path)
    return descriptor


def _whole(call, descriptor: int, buffer: memoryview, offset: int) -> None:
    """Repeat a short read or write until all of it is done."""
    done = 0
    while done < len(buffer):
        count = call(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early")
        done += count
