"""The base of all operations that are timed. The run makes the same operations.

An operation is ``issue(size_bytes, round_index) -> handle``. The bytes have arrived when
``handle.wait()`` returns (on CUDA: for the next work of the current stream). ``busy=True``
gives a second instance with its own process groups, to run at the same time as a measured one.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from megatron_ext.measure.fabric import Fabric
from megatron_ext.runtime.worker import Waitable


class Done:
    """Handle of work that was complete when it was issued, or that is on the current stream."""

    def wait(self) -> None:
        pass


DONE = Done()


class Closable(Protocol):
    """An object that runs threads."""

    def close(self) -> None: ...


class Operation(ABC):
    """Base class of operations. ``threads``: the threads that ``close`` ends, if the operation has any.

    ``messages``: one issue counts as this many transfers. ``builds``: tensors are made for every size. ``by_host``: the
    host's processors do most of the work, on a CUDA device as well. ``settles``: the host waits for the device in the
    middle.
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
    def issue(self, size_bytes: int, round_index: int) -> Waitable:
        """Begin the operation and return its handle."""

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        """(bytes of host memory, bytes of device memory) that the operation allocates for this size before it can be
        issued. Making them takes time."""
        return 0, 0

    def drop(self) -> None:
        """Free the memory that was made for one size."""
        return

    def close(self) -> None:
        """End the threads, if there are any."""
        if self.threads is not None:
            self.threads.close()
