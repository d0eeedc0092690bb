"""A machine without a GPU as a device, for the CPU test bench: a thread does, in order, the work given to a stream.

torch releases the interpreter's lock while it copies, so copies overlap compute as they do with a device's copy engine.
Everything else in runtime/ is the same as on a GPU: who issues, who stores which flag, and what waits for what.
"""

import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch

from megatron_ext.runtime.flags import DeviceFlag, poll
from megatron_ext.runtime.recorder import CopyLog
from megatron_ext.runtime.streams import Device
from megatron_ext.runtime.worker import Transfer, Worker


class HostEvent:
    """A point in the work of a stream. Recording it again moves the point. ``mark`` None: the point is reached."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark: Transfer | None = None

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached. Raises the error of the work before it."""
        if self.mark is not None:
            self.mark.wait()


class HostStream:
    """See the note above."""

    log: CopyLog | None = None

    def __init__(self, name: str):
        self._worker = Worker(name)

    def run(self, function: Callable[[], object], name: str | None = None) -> None:
        self._worker.submit(partial(_run, function, None if name is None else self.log, name or ""))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, name: str | None = "") -> None:
        assert destination.dtype is source.dtype
        if self.log is not None:
            self.log.count(source.nbytes)
        self.run(partial(copy_now, destination, source), name)

    def wait(self, event: HostEvent | None) -> None:
        if event is not None and event.mark is not None:
            self.run(event.mark.wait)

    def record(self, event: HostEvent) -> HostEvent:
        event.mark = self._worker.submit(_nothing)
        return event

    def store(self, flag: DeviceFlag, value: int) -> None:
        assert isinstance(flag, DeviceFlag)
        self.run(partial(flag.store, value))

    def wait_flag(self, flag: DeviceFlag, value: int, check: Callable[[], None]) -> None:
        assert isinstance(flag, DeviceFlag)
        self.run(partial(poll, partial(flag.reached, value), check))

    def close(self) -> None:
        self._worker.close()


class HostCompute(HostStream):
    """Work runs on the calling thread, so it is done when the call returns."""

    def __init__(self) -> None:
        """There is no thread."""

    def run(self, function: Callable[[], object], name: str | None = None) -> None:
        with torch.no_grad():
            function()

    def record(self, event: HostEvent) -> HostEvent:
        event.mark = None
        return event

    def close(self) -> None:
        """There is nothing to end."""


class HostDevice(Device):
    """Parameters live in host memory, and threads do the work of a GPU's streams, see the note above."""

    kind, device, compute = "cpu", torch.device("cpu"), HostCompute()

    def stream(self, name: str) -> HostStream:
        return HostStream(name)

    def event(self) -> HostEvent:
        return HostEvent()

    def resizer(self, storage: torch.UntypedStorage) -> Callable[[int], object]:
        return partial(_resize, storage)


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    """Resize ``storage``, unless a parameter in it was turned into a NumPy array, as hashing does here: torch never
    resizes it again, so it keeps its bytes."""
    try:
        storage.resize_(size)
    except RuntimeError:
        if storage.resizable():
            raise
        said = f"a group keeps its {storage.nbytes()} bytes: a NumPy array of a parameter uses them"
        warnings.warn(said, stacklevel=2)


def _run(function: Callable[[], object], log: CopyLog | None, name: str, transfer: Transfer) -> None:
    start = perf_counter_ns() if log is not None else 0
    with torch.no_grad():
        function()
    if log is not None:
        log.add(name, start, perf_counter_ns())


def _nothing(transfer: Transfer) -> None:
    """An empty call, which ends behind everything submitted before."""


def copy_now(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)
