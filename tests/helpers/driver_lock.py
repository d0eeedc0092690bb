"""The driver's lock: one thread has it at a time, and who waits for a stream inside the driver keeps it meanwhile."""

import contextlib
import sys
import threading

FRAMES = 8
"""Of each stack, the innermost so many are said."""

LEFT_OUT = ("/tests/helpers/", "/site-packages/torch/", "/threading.py", "/megatron_ext/cpubench/")
"""Files whose frames say nothing of the code under test."""


def stack_text(frame) -> str:
    """The Python stack up to ``frame``, innermost call last."""
    lines = []
    while frame is not None and len(lines) < FRAMES:
        file = frame.f_code.co_filename
        if not any(part in file for part in LEFT_OUT):
            lines.append(f"    {file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n".join(reversed(lines))


class DriverLock:
    """Until somebody reports a circle of waits; from then on nobody waits any more, so that the run ends.

    Attributes:
        circles: what was reported, with the stacks of all who took part.
    """

    def __init__(self):
        self.circles: list[str] = []
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth, self._what = 0, ""
        self._waiting: dict[int, str] = {}  # by thread, what it wants to call

    def pass_through(self, what: str) -> None:
        """Wait until no other thread has the lock."""
        if self._holder is not None:
            with self._changed:
                self._wait(threading.get_ident(), what)

    def _wait(self, me: int, what: str) -> None:
        self._waiting[me] = what
        self._changed.wait_for(lambda: self._holder in (None, me) or self.circles)
        del self._waiting[me]

    @contextlib.contextmanager
    def held(self, what: str):
        """For a call that returns when a stream is done."""
        me = threading.get_ident()
        with self._changed:
            self._wait(me, what)
            holds = self._holder in (None, me)
            if holds:
                self._depth += 1
                self._holder, self._what = me, what if self._depth == 1 else self._what
        try:
            yield
        finally:
            if holds:
                with self._changed:
                    self._depth -= 1
                    if self._depth == 0:
                        self._holder = None
                        self._changed.notify_all()

    def report_circle(self, heads: list[str]) -> None:
        """The holder waits and nothing gets on: where somebody waits for the lock meanwhile, this is a circle.

        Args:
            heads: what streams wait for.
        """
        with self._changed:
            if self._holder != threading.get_ident() or not self._waiting or self.circles:
                return
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            frames = sys._current_frames()
            text = [f"circle of waits: {names.get(self._holder)} holds the driver's lock in {self._what}"]
            text += [stack_text(frames[self._holder]), *(f"  while {head}," for head in heads)]
            for thread, what in self._waiting.items():
                text += [f"  and {names.get(thread)} waits for the lock to call {what}", stack_text(frames.get(thread))]
            self.circles.append("\n".join(text))
            self._changed.notify_all()
