"""Emulate the slow host link and drive of another machine, for a rehearsal on a machine without a device.

``MEGATRON_EXT_SLOW_LINKS="host_link_mb=250,drive_mb=500"`` sets both rates, in MB/s for each rank. Copies to the device
then run one at a time. Each takes at least as long as its bytes take at that rate, and uses no processor for the rest
of that time. Copies from the device do the same in the other direction. Reads and writes of the drive are real; they
run one at a time, and each takes at least as long as its bytes take. ``measure`` and training both see these links, and
the cost table holds their rates as a caution. ``scripts/slow_links.sh`` sets them, and the network's rate
(``network_mb``), which the kernel enforces.

The product has no code for this. ``tests/helpers/at_start/sitecustomize.py`` calls the functions in :data:`WRAPPED`
with the product's modules when these have been imported.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

VARIABLE = "MEGATRON_EXT_SLOW_LINKS"
NAMES = ("network_mb", "host_link_mb", "drive_mb")
FROM_THE_DEVICE = ("publish", "gradients", "parameters-to-host", "copy_back")
"""Parts of the names of streams whose copies leave the device."""

_DIRECTIONS = {False: threading.Lock(), True: threading.Lock()}
_DRIVE = threading.Lock()
_drive_free_at = 0.0


def rates() -> dict[str, float]:
    """The rates that are set, by name, in MB/s. Raises InputError if the variable is wrong."""
    from megatron_ext.formats.errors import InputError

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


@contextmanager
def host_link(size_bytes: int) -> Iterator[None]:
    """Context of a copy of ``size_bytes`` by a stream's thread: waits for other copies, and until the time is over."""
    rate, stream = rates().get("host_link_mb"), threading.current_thread().name
    if rate is None:
        yield
        return
    with _DIRECTIONS[any(name in stream for name in FROM_THE_DEVICE)]:
        start = time.perf_counter()
        yield
        time.sleep(max(size_bytes / rate / 1e6 - (time.perf_counter() - start), 0.0))


def slow_streams(module) -> None:
    """Slow the copies of ``runtime/host_device.py``."""
    copy = module.copy_now

    @wraps(copy)
    def slow(destination, source):
        with host_link(source.nbytes):
            copy(destination, source)

    module.copy_now = slow


def slow_drive(module) -> None:
    """Slow ``runtime/drive.py``: a transfer ends after the time that a slow drive takes for its bytes and for all
    transfers that were started before."""
    start, write_through = module.DriveFile.start, module.DriveFile.write

    def wait_behind(size_bytes: int):
        global _drive_free_at
        rate, end = rates().get("drive_mb"), 0.0
        if rate is not None:
            with _DRIVE:
                _drive_free_at = end = max(_drive_free_at, time.perf_counter()) + size_bytes / rate / 1e6
        return lambda: time.sleep(max(end - time.perf_counter(), 0.0))

    @wraps(start)
    def slow(self, memory, offset, what, transfer, before_end=None, *, write=False):
        wait = wait_behind(len(memory))

        def ending() -> None:
            wait()
            if before_end is not None:
                before_end()

        start(self, memory, offset, what, transfer, ending, write=write)

    @wraps(write_through)
    def slow_write(self, memory, offset, what):
        wait = wait_behind(memoryview(memory).nbytes)
        write_through(self, memory, offset, what)
        wait()

    module.DriveFile.start, module.DriveFile.write = slow, slow_write


def say_so(module) -> None:
    """Make ``runtime/machine.py`` say that links are emulated, and how fast they are."""
    from megatron_ext.formats.facts import CAUTION

    environment = module.environment

    @wraps(environment)
    def told(*arguments, **how):
        found = environment(*arguments, **how)
        if rates() and found["hardware"]["device"] == "cpu":
            links = ", ".join(
                f"{name.removesuffix('_mb').replace('_', ' ')} {rate:g} MB/s" for name, rate in rates().items()
            )
            said = f"EMULATED links: {links}: measured and simulated figures are not those of this machine's own links"
            found["hardware"][CAUTION] = said
        return found

    module.environment = told


WRAPPED = {
    "megatron_ext.runtime.host_device": slow_streams,
    "megatron_ext.runtime.drive": slow_drive,
    "megatron_ext.runtime.machine": say_so,
}
