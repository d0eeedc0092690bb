"""A plain writer of a drive, until it is killed: what publishing hands to it, with nothing of ours around.

    python benchmarks/plain_writer.py FILE INDEX SHARDS BLOCK_BYTES BYTES

SHARDS such writers share FILE. Each writes its part of a block through the page cache and flushes
it to the drive, block after block from the file's begin to its end and again, as data-parallel
ranks publish their shards of one group after the other.
"""

import os
import sys


def main() -> None:
    path, (index, shards, block_bytes, size_bytes) = sys.argv[1], map(int, sys.argv[2:])
    shard_bytes = block_bytes // shards
    shard = os.urandom(shard_bytes)
    file = os.open(path, os.O_RDWR)
    while True:
        for start in range(0, size_bytes - block_bytes + 1, block_bytes):
            os.pwrite(file, shard, start + index * shard_bytes)
            os.fdatasync(file)
            os.posix_fadvise(file, start, block_bytes, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
