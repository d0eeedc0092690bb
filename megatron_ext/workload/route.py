"""The routes by which a whole group can reach the device, and what planning knows of each.

[Note: A route]
A route is described once for planning, here, and made once for training (``runtime/routes/make_routes.py``). All other
code asks the description which copy the route reads, which links its bytes cross, and what it holds on the device.
docs/architecture.md says how to add a route.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Copy = Literal["cpu", "nvme"]
"""The copies that groups are published to: the node's host copy, or its copy on the drive."""

ON_HOST: Copy = "cpu"
ON_DRIVE: Copy = "nvme"

Link = Literal["gpu", "cpu"]
"""The last link that bytes cross on their way to the device, named as a trace's lane: collectives (``gpu``) or copies
from the host (``cpu``)."""

Route = str
"""The name of a :class:`RouteKind`."""

PIECE_BYTES, MOST_PIECES = 16 << 20, 8


@dataclass(frozen=True)
class RouteKind:
    """What planning knows of a route.

    Attributes:
        name: its name in schedules.
        letter: its letter in a schedule as text.
        link: the last link that its bytes cross.
        copy: the published copy that it reads; None: it gathers the ranks' shards.
        staged: whether it reads through a staging slot, which a ``stage_in`` has filled.
        shard_from_host: whether each rank's shard rests in host memory and is copied from there before it is gathered.
            A group with one data-parallel rank is copied only.
        costs_as: the route whose curve in a cost table holds for it; empty: its own.
    """

    name: str
    letter: str
    link: Link
    copy: Copy | None = None
    staged: bool = False
    shard_from_host: bool = False
    costs_as: str = ""

    @property
    def curve(self) -> str:
        """Name of the route's curve in a table's ``routes``."""
        return self.costs_as or self.name

    @property
    def gathers(self) -> bool:
        """Whether the ranks gather their shards with collectives."""
        return self.copy is None

    @property
    def reads_host_copy(self) -> bool:
        """Whether it needs the host copy, which the ranks of a node share."""
        return self.copy == ON_HOST

    @property
    def needs_device_shard(self) -> bool:
        """Whether each rank's shard has to rest on the device. If so, a group's ``algorithm`` says how it gathers."""
        return self.gathers and not self.shard_from_host

    def network_bytes(self, size_bytes: int, ranks: int) -> int:
        """Bytes received from other ranks for a group of ``size_bytes`` that is sharded among ``ranks`` ranks."""
        return size_bytes - size_bytes // ranks if self.gathers else 0

    def host_link_bytes(self, size_bytes: int, ranks: int) -> int:
        """Bytes copied from host memory to the device."""
        if self.gathers:
            return size_bytes // ranks if self.shard_from_host else 0
        return size_bytes

    def buffer_bytes(self, size_bytes: int, ranks: int) -> int:
        """Bytes of the device buffer that a group passes through; 0: none."""
        return piece_buffer_bytes(size_bytes, ranks) if self.shard_from_host else 0


ALL_GATHER: Route = "gpu"
"""The route of stock Megatron. It needs no memory except the device's, so groups that no other route can bring use
it."""

HOST_COPY: Route = "cpu"

STAGED_COPY: Route = "nvme"

SHARD_GATHER: Route = "cpu_shard"
"""Replaces :data:`ALL_GATHER` for groups whose shards rest in host memory."""

ROUTE_KINDS: dict[Route, RouteKind] = {
    kind.name: kind
    for kind in (
        RouteKind(ALL_GATHER, "g", "gpu"),
        RouteKind(HOST_COPY, "c", "cpu", copy=ON_HOST),
        RouteKind(SHARD_GATHER, "s", "gpu", shard_from_host=True),
        RouteKind(STAGED_COPY, "n", "cpu", copy=ON_DRIVE, staged=True),
    )
}
"""The routes that a schedule can name."""

ROUTES: tuple[Route, ...] = tuple(ROUTE_KINDS)
"""The routes that a cost table can have curves of."""


def kind_of(route: Route) -> RouteKind:
    """The description of a route whose name is known."""
    return ROUTE_KINDS[route]


def shard_pieces(size_bytes: int, ranks: int) -> int:
    """Number of pieces in which ``cpu_shard`` brings a group of ``size_bytes`` that is sharded among ``ranks`` ranks:
    one piece is gathered while the next is copied. With one rank there is one piece.

    A piece has at least :data:`PIECE_BYTES` of the whole group, so that its bytes, not its calls, determine the time.
    """
    return min(max(size_bytes // PIECE_BYTES, 1), MOST_PIECES) if ranks > 1 else 1


def piece_buffer_bytes(size_bytes: int, ranks: int) -> int:
    """Bytes of the buffer in which a piece is gathered, before its parts go to their places; 0 for a single piece."""
    pieces = shard_pieces(size_bytes, ranks)
    return -(-size_bytes // pieces) if pieces > 1 else 0


Algorithm = Literal["hierarchical", "symmetric"]
"""How a schedule can ask route ``gpu`` to gather: ``hierarchical`` gathers between nodes first and then inside each
node; ``symmetric`` gathers with copy engines, in memory that the ranks of a node have registered with each other. A
schedule cannot choose the other algorithms that a cost table names: they belong to the process group."""

HIERARCHICAL: Algorithm = "hierarchical"
SYMMETRIC: Algorithm = "symmetric"

ALGORITHM_NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
