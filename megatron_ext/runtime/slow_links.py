"""A host link and a drive as slow as another machine's: a rehearsal on a machine without a device.

``MEGATRON_EXT_SLOW_LINKS="host_link_mb=250,drive_mb=500"`` sets both, in MB/s for each rank. A copy to the device then
takes at least as long as its bytes take at that rate, one copy at a time, and needs no processor for the rest of that
time; copies from the device have the other direction to themselves. Reads and writes of the drive are real and take at
least as long as their bytes take, one at a time. ``measure`` and training both see these links, and the cost table says
which they were: the name of the device does. ``scripts/slow_links.sh`` sets them, and the network's rate
(``network_mb``), which the kernel bounds.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from megatron_ext.formats.errors import InputError
from megatron_ext.formats.facts import EMULATED

VARIABLE = "MEGATRON_EXT_SLOW_LINKS"
NAMES = ("network_mb", "host_link_mb", "drive_mb")

_DIRECTIONS = {False: threading.Lock(), True: threading.Lock()}
_DRIVE = threading.Lock()
_drive_free_at = 0.0


@cache
def rates() -> dict[str, float]:
    """The rates that are set, by name, in MB/s. Raises InputError where the variable is wrong."""
    found = {}
    for part in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, value = part.partition("=")
        if name not in NAMES:
            raise InputError(f"known: {', '.join(NAMES)}", file=VARIABLE, field=name)
        try:
            found[name] = float(value)
        except ValueError:
            raise InputError("expected a number", file=VARIABLE, field=name, value=value) from None
    return {name: rate for name, rate in found.items() if rate > 0}


def described() -> str:
    """Behind the device's name, where rates are set: that links are emulated, and how fast."""
    links = ", ".join(f"{name.removesuffix('_mb').replace('_', ' ')} {rate:g} MB/s" for name, rate in rates().items())
    return f", {EMULATED}: {links}" if links else ""


@contextmanager
def host_link(size_bytes: int, upward: bool = False) -> Iterator[None]:
    """Around a copy of ``size_bytes``, for which this thread may have to wait. ``upward``: away from the device."""
    rate = rates().get("host_link_mb")
    if rate is None:
        yield
        return
    with _DIRECTIONS[upward]:
        start = time.perf_counter()
        yield
        time.sleep(max(size_bytes / rate / 1e6 - (time.perf_counter() - start), 0.0))


def drive(size_bytes: int, before_end: Callable[[], None] | None) -> Callable[[], None] | None:
    """What to call when the drive has moved ``size_bytes``, just before the end of the transfer: ``before_end``, behind
    the time that a slow drive takes for them and for all that it was given before."""
    global _drive_free_at
    rate = rates().get("drive_mb")
    if rate is None:
        return before_end
    with _DRIVE:
        _drive_free_at = end = max(_drive_free_at, time.perf_counter()) + size_bytes / rate / 1e6

    def ending() -> None:
        time.sleep(max(end - time.perf_counter(), 0.0))
        if before_end is not None:
            before_end()

    return ending
