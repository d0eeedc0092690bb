"""Run a rank's command with an emulated host link and drive: ``emulated_host_link.py [-m MODULE | SCRIPT.py] ...``.

A copy to the device takes at least as long as its bytes take at EMULATED_HOST_LINK_BPS bytes a second, one copy at a
time, and needs no processor for the rest of that time; a copy from the device has the other direction to itself. Reads
of the drive are real and take at least as long as their bytes take at EMULATED_DRIVE_BPS, one read at a time.
"""

import os
import runpy
import sys
import threading
import time
from pathlib import Path

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.drive import DriveFile


def pace_copies(bytes_per_s: float) -> None:
    """Make ``HostDevice.copy`` take the time of such a link."""
    copy, directions = HostDevice.copy, {False: threading.Lock(), True: threading.Lock()}

    def paced(self, destination, source, stream, after, marks=None):
        with directions[threading.current_thread().name.startswith("publish")]:
            start = time.perf_counter()
            found = copy(self, destination, source, stream, after, marks)
            time.sleep(max(source.nbytes / bytes_per_s - (time.perf_counter() - start), 0.0))
            if marks is not None:
                marks[-1] = time.perf_counter_ns()
            return found

    HostDevice.copy = paced


def pace_reads(bytes_per_s: float) -> None:
    """Make reads of ``DriveFile`` end as late as on such a drive."""
    start, free_at, lock = DriveFile.start, 0.0, threading.Lock()

    def paced(self, memory, offset, what, transfer, before_end=None, *, write=False):
        nonlocal free_at
        with lock:
            free_at = end = max(free_at, time.perf_counter()) + len(memory) / bytes_per_s

        def ending() -> None:
            time.sleep(max(end - time.perf_counter(), 0.0))
            if before_end is not None:
                before_end()

        start(self, memory, offset, what, transfer, ending, write=write)

    DriveFile.start = paced


def main() -> None:
    pace_copies(float(os.environ["EMULATED_HOST_LINK_BPS"]))
    pace_reads(float(os.environ["EMULATED_DRIVE_BPS"]))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
