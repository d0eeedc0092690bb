"""What is timed: an operation that the run makes, too.

An operation is ``issue(size_bytes, round_index) -> handle``; the bytes are there when
``handle.wait()`` returns (on CUDA: for what the current stream does next). ``busy=True``
gives a second instance with process groups of its own, to run at the same time as a measured one.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from megatron_ext.measure.fabric import Fabric


class Handle(Protocol):
    """What is waited for: a collective's work, a transfer."""

    def wait(self) -> object:
        """Return when it is complete; on CUDA the stream waits and not the host, as torch's handles do."""
        ...


class Done:
    """Handle of work that was complete when it was issued, or that the current stream does."""

    def wait(self) -> None:
        pass


DONE = Done()


class Closable(Protocol):
    """What runs threads."""

    def close(self) -> None: ...


class Operation(ABC):
    """Base: what all operations share. ``threads``: what ``close`` ends, where the operation has some.

    ``messages``: what is issued counts so many times. ``builds``: tensors are made for every size. ``by_host``: the
    host's processors do most of it on a CUDA device, too. ``settles``: the host waits for the device in the middle.
    """

    name = ""
    messages = 1
    builds = False
    by_host = False
    settles = False

    def __init__(self, fabric: Fabric, busy: bool = False):
        self.fabric, self.busy = fabric, busy
        self.threads: Closable | None = None

    @abstractmethod
    def issue(self, size_bytes: int, round_index: int) -> Handle:
        """Begin; returns what is waited for."""

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        """Of host memory, and of the device's, that it makes before it can be issued at this size and not at another:
        that takes time."""
        return 0, 0

    def drop(self) -> None:
        """Free what was made for one size."""
        return

    def close(self) -> None:
        """End threads: most have none."""
        if self.threads is not None:
            self.threads.close()
