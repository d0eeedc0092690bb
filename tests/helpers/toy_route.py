"""A route that tests add: the host copy in two halves, by a stream of its own, with another name and cost."""

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
    from megatron_ext.runtime.routes.host_copy import HostCopy
    from megatron_ext.runtime.routes.make_routes import READERS

    class InHalves(HostCopy):
        def _copy(self, group, arrival):
            copy, half = self.pool.copies[group.index], group.whole.numel() // 2
            for part in (slice(half), slice(half, None)):
                self.copy(group.whole[part], copy[part], arrival)

    with planned_with(), mock.patch.dict(READERS, {TOY.name: InHalves}):
        yield
