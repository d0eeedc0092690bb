"""A drive is read and written while the process ends: whoever reads ahead has not failed then."""

import subprocess
import sys

READING = """
import atexit, mmap, sys, threading
from megatron_ext.runtime import drive
from megatron_ext.workload.drive_reads import DriveReads

def refuse(thread):
    raise RuntimeError(sys.argv[3])

if sys.argv[2] == "at begin":
    threading.Thread.start = refuse
file = drive.open_own(sys.argv[1], 1 << 20, DriveReads())
memory = memoryview(mmap.mmap(-1, 1 << 20))

def read():
    threading.Thread.start = refuse
    file.read(memory, 0, "a group")
    print("read")

atexit.register(read)
"""


def read_at_exit(folder, when: str, refusal: str) -> subprocess.CompletedProcess:
    """A file is read at exit, when no thread can begin: as Python does from 3.12 on."""
    command = [sys.executable, "-c", READING, str(folder), when, refusal]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_file_is_read_while_the_process_ends(tmp_path):
    ended = read_at_exit(tmp_path, "at exit", "can't create new thread at interpreter shutdown")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "read\n", "")


def test_a_machine_that_has_no_more_threads_is_an_error(tmp_path):
    ended = read_at_exit(tmp_path, "at begin", "can't start new thread")
    assert ended.stdout == "" and "can't start new thread" in ended.stderr
