"""A directory belongs to one process at a time."""

import errno
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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EACCES])
def test_a_file_system_without_locks_is_worked_on(tmp_path, monkeypatch, number):
    """Lustre takes none unless it is mounted so: nobody could use it."""

    def refuse(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if number == errno.EACCES:
        with pytest.raises(InputError, match="cannot be locked: Permission denied"):
            directory_lock.hold(tmp_path, field="--out")
    else:
        directory_lock.hold(tmp_path, field="--out")
        assert (tmp_path / directory_lock.NAME).read_text() == f"{os.getpid()}\n"
