"""A progress bar on standard error (rich: knows terminals, stays quiet in a pipe)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WORD_SECONDS = 10.0
"""How often a line is printed where nothing can be drawn."""


@contextmanager
def bar(shown: bool = True, seconds: float | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """Yields ``progress(done, total, what)``; with ``shown`` false nothing is drawn. Of work that takes about
    ``seconds`` it shows how many are left; where standard error is no terminal, as a line every few seconds."""
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    console = Console(stderr=True)
    begun: list[float] = []
    said = [monotonic()]
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("starting the ranks", total=None, left="")

        def update(done: int, total: int, what: str) -> None:
            begun[:] = begun or [monotonic()] * (done > 0)
            spent = monotonic() - begun[0] if begun else 0.0
            left = "" if seconds is None else f"{max(seconds - spent, 0.0):.0f} s left"
            progress.update(task, completed=done, total=total, description=what, left=left)
            if shown and left and not console.is_terminal and monotonic() > said[0] + WORD_SECONDS:
                said[0] = monotonic()
                print(f"{done} of {total}: {what}, {left}", file=sys.stderr, flush=True)

        yield update
