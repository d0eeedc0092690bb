"""The routes by which a whole group can reach the device, and what planning knows of each.

[Note: A route]
A route is described once for planning, here, and made once for training (``runtime/routes/makers.py``). Everyone else
asks the description which copy it reads, which links its bytes cross, what it holds on the device. docs/architecture.md
says how to add one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Copy = Literal["cpu", "nvme"]
"""Where groups are published: to the node's host copy, or to its copy on the drive."""

ON_HOST: Copy = "cpu"
ON_DRIVE: Copy = "nvme"

Link = Literal["gpu", "cpu"]
"""What bytes cross last on their way to the device, by the lane of a trace: collectives, or copies from the host."""

Route = str
"""The name of a :class:`RouteKind`."""

PIECE_BYTES, MOST_PIECES = 16 << 20, 8


@dataclass(frozen=True)
class RouteKind:
    """What planning knows of a route.

    Attributes:
        name: in schedules.
        letter: in a schedule as text.
        link: on which its last leg travels.
        copy: the published copy that it reads; None: it gathers the ranks' shards.
        staged: it reads through a staging slot, which a ``stage_in`` has filled.
        shard_from_host: each rank's shard rests in host memory and is copied from there before it is gathered. A group
            that one rank holds whole is copied, and that is all.
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
        """Name of its curve in a table's ``routes``."""
        return self.costs_as or self.name

    @property
    def gathers(self) -> bool:
        """Whether the ranks gather their shards, by collectives."""
        return self.copy is None

    @property
    def reads_host_copy(self) -> bool:
        """Whether it needs the node's host copy, which its ranks share."""
        return self.copy == ON_HOST

    @property
    def needs_device_shard(self) -> bool:
        """Whether each rank's shard has to rest on the device. Then a group's ``algorithm`` says how it gathers."""
        return self.gathers and not self.shard_from_host

    def network_bytes(self, size_bytes: int, ranks: int) -> int:
        """Received from other ranks for a group of ``size_bytes`` whose shards ``ranks`` ranks share."""
        return size_bytes - size_bytes // ranks if self.gathers else 0

    def host_link_bytes(self, size_bytes: int, ranks: int) -> int:
        """Copied from host memory to the device."""
        if self.gathers:
            return size_bytes // ranks if self.shard_from_host else 0
        return size_bytes

    def buffer_bytes(self, size_bytes: int, ranks: int) -> int:
        """Of the buffer on the device that a group passes through; 0: none."""
        return piece_buffer_bytes(size_bytes, ranks) if self.shard_from_host else 0


ROUTE_KINDS: dict[Route, RouteKind] = {
    kind.name: kind
    for kind in (
        RouteKind("gpu", "g", "gpu"),
        RouteKind("cpu", "c", "cpu", copy="cpu"),
        RouteKind("cpu_shard", "s", "gpu", shard_from_host=True),
        RouteKind("nvme", "n", "cpu", copy="nvme", staged=True),
    )
}
"""What a schedule can name."""

ROUTES: tuple[Route, ...] = tuple(ROUTE_KINDS)
"""Those that a cost table has curves of."""


def kind_of(route: Route) -> RouteKind:
    """The route of a name that is known."""
    return ROUTE_KINDS[route]


def _first(what: Callable[[RouteKind], bool]) -> Route:
    return next(kind.name for kind in ROUTE_KINDS.values() if what(kind))


ALL_GATHER = _first(lambda kind: kind.needs_device_shard)
"""The route of stock Megatron. It needs no room but the device's: what cannot come otherwise comes by it."""

HOST_COPY = _first(lambda kind: kind.reads_host_copy)

STAGED_COPY = _first(lambda kind: kind.staged)

SHARD_GATHER = _first(lambda kind: kind.shard_from_host)
"""In place of :data:`ALL_GATHER` where shards rest in host memory."""


def shard_pieces(size_bytes: int, ranks: int) -> int:
    """Pieces in which ``cpu_shard`` brings a group of ``size_bytes`` whose shards ``ranks`` ranks hold: one is gathered
    while the next is copied. What one rank holds whole comes in one piece.

    A piece has at least :data:`PIECE_BYTES` of the whole group, so that bytes and not calls set the time.
    """
    return min(max(size_bytes // PIECE_BYTES, 1), MOST_PIECES) if ranks > 1 else 1


def piece_buffer_bytes(size_bytes: int, ranks: int) -> int:
    """Bytes of the buffer in which a piece is gathered, before its parts go to their places; 0 for a single piece."""
    pieces = shard_pieces(size_bytes, ranks)
    return -(-size_bytes // pieces) if pieces > 1 else 0


Algorithm = Literal["hierarchical", "symmetric"]
"""How a schedule can ask route ``gpu`` to gather: between nodes first and inside them after; or by copy engines, in
memory that the ranks of a node have registered with each other. Other names that a cost table compares are the process
group's own affair."""

HIERARCHICAL: Algorithm = "hierarchical"
SYMMETRIC: Algorithm = "symmetric"

ALGORITHM_NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
