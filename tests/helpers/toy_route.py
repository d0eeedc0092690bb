"""A route that tests add: the host copy once more, by a stream of its own, under another name and at another cost."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from megatron_ext.workload.route import ROUTE_KINDS, RouteKind

TOY = RouteKind("toy", "t", "cpu", copy="cpu", costs_as="gpu")


@contextlib.contextmanager
def planned_with() -> Iterator[None]:
    """Within, schedules can name it."""
    with mock.patch.dict(ROUTE_KINDS, {TOY.name: TOY}):
        yield


@contextlib.contextmanager
def added() -> Iterator[None]:
    """Within, runs can train by it, too."""
    from megatron_ext.runtime.routes.makers import READERS

    with planned_with(), mock.patch.dict(READERS, {TOY.name: READERS["cpu"]}):
        yield
