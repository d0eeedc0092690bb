"""A fixture's function that makes what has to be closed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing


def made_and_closed(kind: Callable) -> Iterator[Callable]:
    """Yields ``make(**how)``, which makes one of ``kind``; behind it all of them are closed."""
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(closing(kind(**how)))
