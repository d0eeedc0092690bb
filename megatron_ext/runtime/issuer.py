"""Work that the issuing thread still has to issue, because a thread has to store a flag first.

The issuing thread polls when a step begins, when a backward ends, before the actions between two layers, and while it
waits. Only copies are issued late, never collectives, whose order is that of the program.

[Note: No circle between ranks]
A rank that waits here on the host waits for threads of its node: a drive, a peer on another node. Such a thread may
wait for a copy that another rank's issuing thread still has to issue, while that issuing thread is inside a blocking
call, for example ``.item()``. Data-parallel ranks run the same program. If the other rank is at an earlier place in the
program, all ranks issued what it waits for before that place, so it makes progress. If it is at this place or later, it
has waited here for the same group, and so has issued its part of it. The same holds between pipeline ranks, for each
replica.
"""

from collections import deque
from collections.abc import Callable

from megatron_ext.runtime.flags import poll
from megatron_ext.runtime.worker import Transfer


class Issuer:
    """One instance per rank; only the issuing thread calls its methods."""

    def __init__(self) -> None:
        self.left: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.check: Callable[[], None] = lambda: None  # raises if what this rank waits for will never come

    def when(self, ready: Callable[[], bool], issue: Callable[[], None]) -> None:
        """Call ``issue`` as soon as ``ready()`` is true: now, or when this thread polls."""
        if ready():
            issue()
        else:
            self.left.append((ready, issue))

    def poll(self) -> None:
        """Issue everything that is ready. A call that is issued may wait, and then issues more."""
        for _ in range(len(self.left)):
            if not self.left:
                return
            ready, issue = self.left[0]  # it stays in the list if this raises, so that later waits raise as well
            if ready():
                self.left.popleft()
                issue()
            else:
                self.left.rotate(-1)

    def wait(self, done: Callable[[], bool]) -> None:
        """Block until ``done()``, and issue meanwhile what is ready. Raises the error of a check."""
        if not done():
            poll(done, self.check, self.poll)

    def join(self, transfer: Transfer | None) -> None:
        """Block until ``transfer`` has ended; raise its error, if any."""
        if transfer is not None:
            self.wait(lambda: transfer.ended)
            transfer.check()
