"""Progress on standard error: on a terminal one line that changes, otherwise a new line every few seconds."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import IO

WORD_SECONDS, DRAWN_SECONDS = 10.0, 0.5
"""Seconds between two printed lines (also while one piece of work lasts), and between two changes on a terminal."""

LONG_SECONDS = 2.0
"""After this time a line shows how long its piece of work has lasted."""

LARGE_BYTES = 1 << 30
"""From this size on, a line mentions that memory is being made."""

CLEAR = "\r\x1b[K"
"""Returns to the start of the terminal's line and clears it."""


class Words:
    """The text of a line about work that takes roughly ``seconds``. While ``done`` is 0 the work is still starting."""

    def __init__(self, seconds: float):
        self.seconds, self.started, self.begun = seconds, monotonic(), None
        self.since, self.what, self.done, self.total = self.started, "", 0, 0

    def update(self, done: int, total: int, what: str) -> None:
        """Set what the work is doing now."""
        now = monotonic()
        if self.begun is None and done > 0:
            self.begun = now
        if what != self.what:
            self.since, self.what = now, what
        self.done, self.total = done, total

    def line(self) -> str:
        """The line for people."""
        now = monotonic()
        lasts = f" for {now - self.since:.0f} s" if self.what and now - self.since >= LONG_SECONDS else ""
        if self.begun is None:
            return f"starting: {now - self.started:.0f} s" + (f", {self.what}{lasts}" if self.what else "")
        left = self.begun + self.seconds - now
        return f"{self.done} of {self.total}: {self.what}{lasts}, {abs(left):.0f} s {'left' if left >= 0 else 'over'}"


def visit_text(name: str, size_bytes: int, made_bytes: int, seconds: float) -> str:
    """The text of a visit: the curve and the size. If they are large, also the host memory that it makes and the time
    that it needs."""
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
    size = next(f"{size_bytes / unit:.4g} {words}" for unit, words in units if size_bytes >= unit)
    making = f", making {made_bytes / 1e9:.1f} GB of host memory" if made_bytes > LARGE_BYTES else ""
    return f"{name} {size}{making}" + (f", about {seconds:.0f} s" if seconds > 1 else "")


@contextmanager
def bar(seconds: float, stream: IO[str]) -> Iterator[Callable[[int, int, str], None]]:
    """Yields ``progress(done, total, what)`` for work that takes roughly ``seconds``. Lines are written to
    ``stream``."""
    words, ended, drawn = Words(seconds), threading.Event(), stream.isatty()

    def say() -> None:
        while not ended.wait(DRAWN_SECONDS if drawn else WORD_SECONDS):
            line = CLEAR + words.line()[: shutil.get_terminal_size().columns - 1] if drawn else words.line() + "\n"
            print(line, end="", file=stream, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield words.update
    finally:
        ended.set()
        thread.join()
        print(CLEAR if drawn else "", end="", file=stream, flush=True)
