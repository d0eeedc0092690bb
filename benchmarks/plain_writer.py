"""A plain reader or writer of a drive, until it is killed, with nothing of ours around.

    python benchmarks/plain_writer.py FILE INDEX SHARDS BLOCK_BYTES BYTES
    python benchmarks/plain_writer.py FILE read|write|fill BLOCK_BYTES BYTES

SHARDS writers of the first form share FILE. Each writes its part of a block through the page cache and flushes
it to the drive, block after block from the file's begin to its end and again, as data-parallel
ranks publish their shards of one group after the other.

The second form reads or writes FILE past the page cache, block after block, one at a time; ``fill`` writes it once.
"""

import mmap
import os
import sys


def write_shards(path: str, index: int, shards: int, block_bytes: int, size_bytes: int) -> None:
    shard_bytes = block_bytes // shards
    shard = os.urandom(shard_bytes)
    file = os.open(path, os.O_RDWR)
    while True:
        for start in range(0, size_bytes - block_bytes + 1, block_bytes):
            os.pwrite(file, shard, start + index * shard_bytes)
            os.fdatasync(file)
            os.posix_fadvise(file, start, block_bytes, os.POSIX_FADV_DONTNEED)


def move(path: str, direction: str, block_bytes: int, size_bytes: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_DIRECT)
    memory = mmap.mmap(-1, block_bytes)  # aligned, as O_DIRECT asks
    memory.write(os.urandom(block_bytes))
    call = os.preadv if direction == "read" else os.pwritev
    while True:
        for start in range(0, size_bytes, block_bytes):
            call(file, [memory], start)
        if direction == "fill":
            return


if __name__ == "__main__":
    if sys.argv[2] in ("read", "write", "fill"):
        move(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
    else:
        write_shards(sys.argv[1], *map(int, sys.argv[2:]))
