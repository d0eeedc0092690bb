"""A drive is read and written while the process ends: whoever reads ahead has not failed then."""

import subprocess
import sys

READING = """
import atexit, mmap, sys
from megatron_ext.runtime import drive
from megatron_ext.workload.drive_reads import DriveReads

file = drive.open_own(sys.argv[1], 1 << 20, DriveReads())
memory = memoryview(mmap.mmap(-1, 1 << 20))

def read():
    file.read(memory, 0, "a group")
    print("read")

atexit.register(read)
"""


def test_a_file_is_read_while_the_process_ends(tmp_path):
    ended = subprocess.run([sys.executable, "-c", READING, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "read\n", "")
