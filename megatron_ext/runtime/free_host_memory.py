"""How much host memory this machine, or a cgroup that the process is in, still has.

The pages of a shared anonymous file count as memory of the cgroup of the process that makes them. If that cgroup has
no room left, the kernel ends a process. So the bytes needed are compared with the free bytes before they are taken.
Source: the kernel's documentation of cgroup v2 (memory.max, memory.current, memory.stat) and v1.
"""

import resource
from pathlib import Path

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import cgroups
from megatron_ext.runtime.system_files import text_of

MEMINFO = Path("/proc/meminfo")
V2_NAMES = ("inactive_file", "active_file", "file_mapped", "file_dirty", "file_writeback")
V1_NAMES = tuple(f"total_{name}" for name in ("inactive_file", "active_file", "mapped_file", "dirty", "writeback"))
"""Names in memory.stat of both versions: cached files, and those of them that have to stay for a while."""


def available_bytes() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say."""
    known = [_machine("MemAvailable"), *(limit - held for limit, held in _cgroups())]
    return min((figure for figure in known if figure is not None), default=None)


def limit_bytes() -> int | None:
    """The machine's memory that a cgroup, or the limit on this process's address space, allows; None: all of it."""
    limits = [resource.getrlimit(resource.RLIMIT_AS)[0], *(limit for limit, _ in _cgroups())]
    return min((limit for limit in limits if 0 <= limit < (_machine("MemTotal") or 0)), default=None)


def require(need_bytes: int, what: str) -> None:
    """Check that ``need_bytes`` of host memory are available for ``what``.

    Raises:
        InputError: names the bytes that are missing.
    """
    available = available_bytes()
    if available is not None and need_bytes > available:
        said = f"{what} need {need_bytes} bytes of host memory, {need_bytes - available} bytes short"
        raise InputError(said, field="host memory", value=available)


def _machine(what: str) -> int | None:
    words = (line.split() for line in text_of(MEMINFO).splitlines())
    return next((int(said) * 1024 for name, said, *_ in words if name == f"{what}:"), None)


def _cgroups() -> list[tuple[int, int]]:
    """Limit and used bytes of the process's cgroup and of all its parents, of both versions."""
    found = (_limit(place, version) for version, place in cgroups.places("memory"))
    return [pair for pair in found if pair is not None]


def _limit(place: Path, version: int) -> tuple[int, int] | None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (text_of(place / name).strip() for name in names)
    # The kernel drops cached files before it refuses memory.
    return (int(limit), int(used) - _cached_files(place, version)) if limit.isdecimal() and used else None


def _cached_files(place: Path, version: int) -> int:
    """Bytes of cached files that are inactive, or that are neither mapped nor waiting to be written."""
    names = V2_NAMES if version == 2 else V1_NAMES
    pairs = (line.split() for line in text_of(place / "memory.stat").splitlines())
    inactive, active, *kept = map({pair[0]: int(pair[1]) for pair in pairs}.get, names)
    return max(inactive or 0, (inactive or 0) + (active or 0) - sum(size or 0 for size in kept))
