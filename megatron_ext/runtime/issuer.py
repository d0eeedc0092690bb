"""What the issuing thread has still to issue, because a thread has something to store first.

The issuing thread polls where a step begins, where a backward ends, before the actions between two layers, and where it
waits. What it issues late are copies and never collectives, whose order is that of the program.

[Note: No circle between ranks]
A rank that waits here on the host waits for threads of its node: a drive, a peer on another node. Such a thread may
wait for a copy that another rank's issuing thread has still to issue, while that thread is inside of a call that
blocks, for example ``.item()``. Data-parallel ranks run the same program. If the other is at an earlier place in it,
what it waits for was issued by all before that place, so it gets on; if it is at this place or behind, it has waited
for the same group here, and so has issued its own part of it. Between pipeline ranks the same holds of each replica.
"""

from collections import deque
from collections.abc import Callable

from megatron_ext.runtime.flags import poll
from megatron_ext.runtime.worker import Transfer


class Issuer:
    """One instance a rank; all its methods belong to the issuing thread."""

    def __init__(self) -> None:
        self.left: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.checks: list[Callable[[], None]] = []

    def when(self, ready: Callable[[], bool], issue: Callable[[], None]) -> None:
        """Call ``issue`` as soon as ``ready()``: now, or when this thread polls."""
        if ready():
            issue()
        else:
            self.left.append((ready, issue))

    def poll(self) -> None:
        """Issue what can be. What is issued may wait, and so issue more."""
        for _ in range(len(self.left)):
            if not self.left:
                return
            ready, issue = self.left[0]  # it stays where this raises: so does whoever waits for it later
            if ready():
                self.left.popleft()
                issue()
            else:
                self.left.rotate(-1)

    def wait(self, done: Callable[[], bool]) -> None:
        """Block until ``done()``, and issue meanwhile what can be. Raises what a check raises."""
        if not done():
            poll(done, self._check, self.turn)

    def join(self, transfer: Transfer | None) -> None:
        """Block until ``transfer`` has ended, and raise what it raised."""
        if transfer is not None:
            self.wait(lambda: transfer.ended)
            transfer.check()

    def finish(self) -> None:
        """Block until everything is issued."""
        self.wait(lambda: not self.left)

    def turn(self) -> None:
        """:meth:`poll`, where anything is left."""
        if self.left:
            self.poll()

    def _check(self) -> None:
        for check in self.checks:
            check()
