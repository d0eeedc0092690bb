"""The cgroups (v1 and v2) that this process is in: what a container or a Slurm job may use of the machine.

Source: the kernel's documentation of cgroup v2 (cpu.max) and v1 (cpu.cfs_quota_us).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from megatron_ext.runtime.system_files import text_of

OWN = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def places(controller: str) -> Iterator[tuple[int, Path]]:
    """Version and directory of the process's cgroup and of all its parents, where ``controller`` may set limits."""
    lines = [line.split(":", 2)[1:] for line in text_of(OWN).splitlines()]
    for version, root in ((2, ROOT), (1, ROOT / controller)):
        # "0::/path", or "4:memory:/path". Inside a container the path may not be mounted.
        paths = [path for names, path in lines if (controller in names.split(",")) == (version == 1)]
        own = PurePosixPath(paths[0].lstrip("/")) if paths and ".." not in paths[0] else PurePosixPath()
        yield from ((version, root / place) for place in {own, *own.parents, PurePosixPath()})


def processor_quota(number: int) -> int:
    """``number``, or the CPU quota of the cgroups in processors if that is less; at least 1.

    With more threads than the quota, all threads are stopped together for the rest of each period.
    """
    for version, place in places("cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(ValueError):  # no such file, or "max"; -1 in version 1 is no limit either
            quota, period = map(int, " ".join(text_of(place / name) for name in names).split())
            number = min(number, max(quota // period, 1)) if quota > 0 else number
    return number
