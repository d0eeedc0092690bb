"""What killed ranks have left: named files that they had in shared memory, and nobody else's."""

from kill_and_resume import shared_files

MAPS = """\
7f00-7f01 rw-s 00000000 00:1a 12  /dev/shm/ours.block
7f01-7f02 rw-s 00000000 00:1a 12  /dev/shm/ours.block
7f02-7f03 rw-s 00000000 00:1a 13  /dev/shm/nccl-4f2a
7f03-7f04 rw-s 00000000 00:1a 14  /dev/shm/unlinked (deleted)
7f04-7f05 rw-s 00000000 00:01 15  /memfd:megatron_ext (deleted)
7f05-7f06 r-xp 00000000 08:01 16  /usr/lib/libc.so.6
"""


def test_files_of_ours_in_shared_memory_are_those_that_a_rank_maps():
    assert shared_files(MAPS) == ["/dev/shm/ours.block"]
