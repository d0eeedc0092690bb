"""A drive is read and written while the process ends: whoever reads ahead has not failed then."""

import subprocess
import sys

import pytest

READING = """
import atexit, mmap, sys, threading
from megatron_ext.runtime import drive
from megatron_ext.workload.drive_reads import DriveReads

file = drive.open_own(sys.argv[1], 1 << 20, DriveReads())
memory = memoryview(mmap.mmap(-1, 1 << 20))

def refuse(thread):
    raise RuntimeError(sys.argv[2])

def read():
    if sys.argv[2]:
        threading.Thread.start = refuse
    file.read(memory, 0, "a group")
    print("read")

atexit.register(read)
"""


NO_THREAD = "can't create new thread at interpreter shutdown"
"""What Python says from 3.12 on; here the other versions say so, too."""


def read_at_exit(folder, refusal: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", READING, str(folder), refusal]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("refusal", ["", NO_THREAD])
def test_a_file_is_read_while_the_process_ends(tmp_path, refusal):
    ended = read_at_exit(tmp_path, refusal)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "read\n", "")


def test_a_machine_that_has_no_more_threads_is_an_error(tmp_path):
    ended = read_at_exit(tmp_path, "can't start new thread")
    assert ended.stdout == "" and "can't start new thread" in ended.stderr
