"""Lanes: transfers of one link in issue order, on a thread or on a stream.

A function that is submitted to a lane waits for flags, then copies. On a :class:`ThreadLane` a thread calls it, and
polls the flags. On a :class:`StreamLane` the training thread calls it at once, and everything in it is queued on a
stream, see [Note: Order by streams] in stream_flags.py.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_ext.runtime.worker import Transfer, Worker


class Handle(Protocol):
    """A transfer on its way."""

    def wait(self) -> object:
        """Return when work queued from now on, on the current stream, will find the transfer done."""
        ...

    def finished(self, device) -> None:
        """Block the calling thread until the bytes have moved."""
        ...


class ThreadLane:
    """On CPU the copy itself happens on the thread (torch releases the interpreter while it copies). On CUDA the thread
    waits until a copy may be issued, then issues it on its stream."""

    flag_stream = None
    """A stream that waits for flags and stores them; None: threads do."""

    def __init__(self, name: str, device):
        self.worker, self.device, self.stream = Worker(name), device, device.copy_stream()

    def submit(self, function: Callable[[Any, Any], Any]) -> Handle:
        """Call ``function(lane, after)``, which returns what :meth:`copy` does; ``after`` is the work so far of the
        calling thread's stream."""
        after = self.device.mark()

        def run(transfer: Transfer) -> None:
            transfer.after = function(self, after)

        return self.worker.submit(run)

    def delay(self, pause: Callable | None) -> None:
        """Sleep for an injected delay before the next copy."""
        if pause is not None:
            pause()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after, marks: list | None = None):
        """See ``copy`` of the device."""
        with torch.no_grad():
            return self.device.copy(destination, source, self.stream, after, marks)

    def close(self) -> None:
        self.worker.close()


class StreamLane:
    """Everything is queued on a stream when it is submitted. Not yet run on a GPU."""

    def __init__(self, device):
        self.device, self.stream = device, device.copy_stream()
        self.flag_stream = self.stream

    def submit(self, function: Callable[[Any, Any], Any]) -> Handle:
        return function(self, self.device.mark())

    def delay(self, pause: Callable | None) -> None:
        if pause is not None:
            pause(lambda seconds: self.device.sleep(self.stream, seconds))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after, marks: list | None = None):
        return self.device.copy(destination, source, self.stream, after, marks)

    def close(self) -> None:
        """Nothing: what is queued ends before the memory is unpinned."""


def open_lane(name: str, device) -> ThreadLane | StreamLane:
    """A lane on a stream where the device has flags for streams, otherwise one on a thread."""
    return ThreadLane(name, device) if device.flags is None else StreamLane(device)
