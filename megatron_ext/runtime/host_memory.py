"""How much host memory this machine, or the cgroup that the process runs in, can still give."""

from pathlib import Path

from megatron_ext.formats.errors import InputError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say."""
    known = [figure for figure in (_machine(), _cgroup()) if figure is not None]
    return min(known, default=None)


def require(need_bytes: int, what: str) -> None:
    """Refuse what does not fit.

    Raises:
        InputError: with the bytes that are missing.
    """
    available = available_bytes()
    if available is not None and need_bytes > available:
        raise InputError(
            f"{what} need {need_bytes} bytes of host memory, {need_bytes - available} bytes short",
            field="host memory",
            value=available,
        )


def _machine() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup() -> int | None:
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdecimal() else None
