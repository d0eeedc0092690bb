"""A directory belongs to one process at a time."""

import fcntl
import os

import pytest

from megatron_ext.formats import directory_lock
from megatron_ext.formats.errors import InputError


def test_a_directory_in_use_is_refused(tmp_path):
    with open(tmp_path / directory_lock.NAME, "w") as other:  # as another process would
        fcntl.flock(other, fcntl.LOCK_EX)
        print(4711, file=other, flush=True)
        with pytest.raises(InputError, match=f"^--out = '{tmp_path}': is in use by process 4711$"):
            directory_lock.hold(tmp_path, field="--out")
    for _ in range(2):  # the second time it is this process's already
        directory_lock.hold(tmp_path, field="--out")
    with open(tmp_path / directory_lock.NAME) as other:
        assert other.read() == f"{os.getpid()}\n"
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
