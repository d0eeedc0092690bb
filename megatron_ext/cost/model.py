"""The cost table file: what every route costs on the machines it was measured on.

Times are microseconds, sizes the bytes of the whole (gathered) group for every route, so
that routes compare directly. A curve with no points is not offered; a missing figure is
never 0, and there is no built-in default table.
"""

import math
from typing import Any, Literal

import msgspec

from megatron_ext import files
from megatron_ext.errors import InputError
from megatron_ext.workload.route import ROUTES

SCHEMA_VERSION = 1

class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One measured size. ``issued_us`` is the time until the call returned, where it is
    asynchronous; ``p50_us`` the time until the bytes had arrived. ``processor_us``: processor
    time of all threads of one rank and of the kernel for its packets, on machines where transports take it
    from compute; as if the rank was alone, like compute."""

    size_bytes: int
    p50_us: float
    p95_us: float | None = None
    samples: int = 1
    issued_us: float | None = None
    processor_us: float | None = None


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Cost by size. ``algorithms`` holds one curve a name where a source compares several
    (nccl_ring, nccl_tree, ...); ``source`` says where the figures come from."""

    points: tuple[Point, ...] = ()
    algorithms: dict[str, tuple[Point, ...]] = {}
    source: str | None = None
    settings: dict[str, Any] = {}


class Routes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    gpu: Curve | None = None
    cpu: Curve | None = None
    nvme: Curve | None = None


class Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Write-back after the optimizer step: into the host copy (``cpu``), onto the drive
    (``nvme``), and between nodes (``internode``, bytes that cross the network). Complete when
    the last rank of a node has written; between nodes, with a second group on its way behind the first.
    ``points`` is short for ``cpu``."""

    cpu: Curve | None = None
    nvme: Curve | None = None
    internode: Curve | None = None
    points: tuple[Point, ...] = ()


class GroupOverhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a gather costs beyond its bytes: ``call_us`` per issued call on the calling
    thread; ``flatten`` one copy into (or out of) one flat tensor, by bytes; ``coalesced``
    several groups in one call (``settings.groups``), by the sum of their bytes."""

    call_us: float | None = None
    flatten: Curve | None = None
    coalesced: Curve | None = None


KINDS = ("compute", "gpu", "cpu", "nvme", "publish", "p2p", "reduce")
"""Activities that can disturb each other; the names that rows of ``contention`` use."""


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``measured`` takes ``p50_us`` for ``size_bytes`` while ``busy`` works: ``slowdown``
    times what it takes alone. Names are those of :data:`KINDS`."""

    measured: str
    busy: str
    slowdown: float
    size_bytes: int | None = None
    p50_us: float | None = None


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Forward and backward of one micro-batch through one chunk (``pp_rank`` and
    ``model_chunk_id``) or through one layer of a kind (``layer_kind``). The kind ``step`` is what
    every step of a chunk takes beside its layers."""

    forward_us: float
    backward_us: float
    pp_rank: int | None = None
    model_chunk_id: int | None = None
    layer_kind: str | None = None
    forward_p95_us: float | None = None
    backward_p95_us: float | None = None
    samples: int = 1


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What links share. ``nic_shares_pcie``: the NIC that carries all-gathers and host copies
    use one PCIe link. ``processors_per_node``: on machines without accelerators, processors
    that the node's ranks share (compute slows down when more ranks than these compute);
    ``nodes_sharing`` neighbouring nodes have them together, where nodes are emulated on one machine."""

    nic_shares_pcie: bool = False
    processors_per_node: float | None = None
    nodes_sharing: int | None = None


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The environment the figures hold for. ``synthetic`` is true for tables not measured.
    ``model``: what compute was measured of (``hidden_size``, ``seq_length``, ``micro_batch_size``,
    ``dtype``); absent where it was not."""

    created_at: str = ""
    synthetic: bool = False
    hardware: Any = None
    software: Any = None
    world_sizes: Any = None
    model: Any = None
    source: Any = None
    notes: tuple[str, ...] = ()


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Everything measured. ``reduce`` (gradient reduce-scatter by group bytes) and
    ``optimizer`` (one optimizer step by bytes of whole parameters of one rank) are needed
    only to predict a whole iteration; a prediction without them says that it leaves them out.
    ``all_reduce`` is no route: it is imported to compare algorithms by size.
    """

    schema_version: int
    kind: Literal["cost_table"]
    metadata: Metadata = Metadata()
    routes: Routes = Routes()
    publish: Publish = Publish()
    group_overhead: GroupOverhead = GroupOverhead()
    contention: tuple[Contention, ...] = ()
    compute: tuple[Compute, ...] = ()
    p2p: Curve | tuple[Point, ...] = ()
    reduce: Curve | None = None
    optimizer: Curve | None = None
    all_reduce: Curve | None = None
    topology: Topology = Topology()


def load(path) -> CostTable:
    """Read and check a cost table. Raises InputError naming file, field and value."""
    return check(files.load(path, CostTable), file=path)


def save(path, table: CostTable) -> None:
    files.save(path, table, indent=1)


def check(table: CostTable, *, file=None) -> CostTable:
    """Check a decoded table and return it in one form (``publish.points`` and a bare list of
    p2p points are moved into curves; points sorted by size).

    Raises:
        InputError: naming the field and its value.
    """
    if table.schema_version != SCHEMA_VERSION:
        raise InputError(f"unknown version; this release reads {SCHEMA_VERSION}", file=file, field="schema_version", value=table.schema_version)

    def curve(value: Curve | None, field: str) -> Curve | None:
        if value is None:
            return None
        algorithms = {name: _checked(points, f"{field}.algorithms.{name}", file) for name, points in value.algorithms.items()}
        return msgspec.structs.replace(value, points=_checked(value.points, f"{field}.points", file), algorithms=algorithms)

    routes = Routes(**{name: curve(getattr(table.routes, name), f"routes.{name}") for name in ROUTES})
    publish = table.publish
    if publish.points and publish.cpu is not None:
        raise InputError("both points and cpu are given; they mean the same", file=file, field="publish")
    publish = Publish(
        cpu=curve(Curve(points=publish.points) if publish.points else publish.cpu, "publish.cpu"),
        nvme=curve(publish.nvme, "publish.nvme"),
        internode=curve(publish.internode, "publish.internode"),
    )
    p2p = curve(table.p2p if isinstance(table.p2p, Curve) else Curve(points=table.p2p), "p2p")
    overhead = table.group_overhead
    if overhead.call_us is not None:
        _positive(overhead.call_us, "group_overhead.call_us", file, zero=True)
    for index, row in enumerate(table.contention):
        for name in ("measured", "busy"):
            if getattr(row, name) not in KINDS:
                raise InputError(f"known: {', '.join(KINDS)}", file=file, field=f"contention[{index}].{name}", value=getattr(row, name))
        if row.size_bytes is not None and row.size_bytes < 0:
            raise InputError("must not be negative", file=file, field=f"contention[{index}].size_bytes", value=row.size_bytes)
        _positive(row.slowdown, f"contention[{index}].slowdown", file)
        if row.p50_us is not None:
            _positive(row.p50_us, f"contention[{index}].p50_us", file)
    seen = set()
    for index, row in enumerate(table.compute):
        field = f"compute[{index}]"
        by_place = row.pp_rank is not None and row.model_chunk_id is not None
        if by_place == (row.layer_kind is not None) or (row.pp_rank is None) != (row.model_chunk_id is None):
            raise InputError("give either pp_rank and model_chunk_id, or layer_kind", file=file, field=field)
        _positive(row.forward_us, f"{field}.forward_us", file)
        _positive(row.backward_us, f"{field}.backward_us", file)
        place = (row.pp_rank, row.model_chunk_id, row.layer_kind)
        if place in seen:
            raise InputError("is there twice", file=file, field=field)
        seen.add(place)
    if table.topology.processors_per_node is not None:
        _positive(table.topology.processors_per_node, "topology.processors_per_node", file)
    if table.topology.nodes_sharing is not None:
        _positive(table.topology.nodes_sharing, "topology.nodes_sharing", file)
    return msgspec.structs.replace(
        table,
        routes=routes,
        publish=publish,
        p2p=p2p,
        group_overhead=msgspec.structs.replace(
            overhead,
            flatten=curve(overhead.flatten, "group_overhead.flatten"),
            coalesced=curve(overhead.coalesced, "group_overhead.coalesced"),
        ),
        reduce=curve(table.reduce, "reduce"),
        optimizer=curve(table.optimizer, "optimizer"),
        all_reduce=curve(table.all_reduce, "all_reduce"),
    )


def _checked(points: tuple[Point, ...], field: str, file) -> tuple[Point, ...]:
    sizes = set()
    for index, point in enumerate(points):
        where = f"{field}[{index}]"
        if point.size_bytes < 0:
            raise InputError("must not be negative", file=file, field=f"{where}.size_bytes", value=point.size_bytes)
        if point.size_bytes in sizes:
            raise InputError("is there twice", file=file, field=f"{where}.size_bytes", value=point.size_bytes)
        sizes.add(point.size_bytes)
        _positive(point.p50_us, f"{where}.p50_us", file)
        if point.p95_us is not None:
            _positive(point.p95_us, f"{where}.p95_us", file)
            if point.p95_us < point.p50_us:
                raise InputError("is below p50_us", file=file, field=f"{where}.p95_us", value=point.p95_us)
        for name in ("issued_us", "processor_us"):
            if getattr(point, name) is not None:
                _positive(getattr(point, name), f"{where}.{name}", file, zero=True)
        if point.samples < 1:
            raise InputError("must be at least 1", file=file, field=f"{where}.samples", value=point.samples)
    return tuple(sorted(points, key=lambda point: point.size_bytes))


def _positive(value: float, field: str, file, *, zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise InputError("must be a positive, finite number", file=file, field=field, value=value)
