"""The cost table file: the costs of every route on the machines where they were measured.

Times are in microseconds. Sizes are the bytes of the whole (gathered) group for every route, so that routes compare
directly. A curve without points is not offered. A missing figure is never 0, and there is no built-in default table.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from megatron_ext.cost.hardware_sheet import HardwareSheet
from megatron_ext.cost.measured_curve import Curve, MaybeCurve, Point, checked_points, with_points
from megatron_ext.formats import json_files
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.facts import Facts
from megatron_ext.formats.versions import SCHEMA_VERSION as SCHEMA_VERSION
from megatron_ext.workload.gpt_shapes import MicroBatch
from megatron_ext.workload.route import ALGORITHM_NAMES, ROUTES

MOST_SLOWDOWN = 1e6

JOINED, CAST_ON_DEVICE = "joined", "cast_on_device"
"""Algorithms of ``host_step``: the step as a run makes it by a schedule. Adjacent tensors are joined into one, and
copies overlap with steps. With ``joined`` parameters are cast to 16 bits on the host, with ``cast_on_device`` on the
device."""

CHOSEN = {"routes.gpu": ALGORITHM_NAMES, "host_step": (JOINED, CAST_ON_DEVICE)}
"""By curve, the algorithms that a schedule chooses. Of all others the fastest one counts at every size."""

ESTIMATE = "megatron-ext cost estimate"
"""Program in the source of a table that was estimated from a data sheet."""


class Routes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    gpu: MaybeCurve = None
    cpu: MaybeCurve = None
    cpu_shard: MaybeCurve = None
    nvme: MaybeCurve = None


class Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Write-back after the optimizer step: into the host copy (``cpu``), onto the drive (``nvme``), and between nodes
    (``internode``, by bytes that cross the network). It is complete when the last rank of a node has written. Between
    nodes it is measured with a second group in flight after the first."""

    cpu: MaybeCurve = None
    nvme: MaybeCurve = None
    internode: MaybeCurve = None


class ExpertCurves(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Collectives among the ``ranks`` that share the shards of an expert, if these are not the data-parallel ranks.
    ``gpu`` has all-gathers and ``reduce`` has reduce-scatters, as ``routes.gpu`` and ``reduce`` have for data-parallel
    ranks."""

    ranks: int
    gpu: MaybeCurve = None
    reduce: MaybeCurve = None


class GroupOverhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Costs of a gather besides its bytes: ``call_us`` per issued call, on the calling thread."""

    call_us: float | None = None


KINDS = ("compute", "gpu", "cpu", "nvme", "publish", "p2p", "reduce", "host_step", "host_add")
"""Activities that can disturb each other, by the names that rows of ``contention`` use."""


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``measured`` takes ``p50_us`` for ``size_bytes`` while ``busy`` runs, which is ``slowdown`` times its time alone.
    Names are those of :data:`KINDS`. ``nvme`` is the read from the drive into the staging slot. The copy to the device
    that follows is a copy of kind ``cpu``."""

    measured: str
    busy: str
    slowdown: float
    size_bytes: int | None = None
    p50_us: float | None = None


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Forward and backward of one micro-batch through one chunk (``pp_rank`` and ``model_chunk_id``) or through one
    layer of a kind (``layer_kind``). The kind ``step`` is the time of a chunk's step in addition to its layers.
    ``activation_bytes``: what autograd saves in one such layer for the backward of one micro-batch.
    ``recompute_bytes``: what that backward recomputes. ``forward_launch_us`` and ``backward_launch_us``: the time for
    which the training thread is busy with launching it from Python."""

    forward_us: float
    backward_us: float
    pp_rank: int | None = None
    model_chunk_id: int | None = None
    samples: int = 1
    layer_kind: str | None = None
    forward_p95_us: float | None = None
    backward_p95_us: float | None = None
    activation_bytes: int | None = None
    recompute_bytes: int = 0
    forward_launch_us: float | None = None
    backward_launch_us: float | None = None


TIMES = tuple(f"{way}_{figure}" for figure in ("us", "p95_us", "launch_us") for way in ("forward", "backward"))
"""Names of the times of a row of ``compute``."""


class Launches(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Time of the training thread in addition to launching layers: for the reduce of one group, and for the optimizer's
    step of one parameter. ``slowest``: the factor by which all launches may take longer, including those of layers."""

    reduce_us: float
    tensor_us: float
    slowest: float = 1.0


class SetUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Time that host copies take before the first step, per GiB of a node, with all of its ranks at once: to make their
    pages (``pages``), and to page-lock them on every rank (``pin``). ``beside_allocator_bytes``: bytes that a rank
    holds on its device outside of PyTorch's blocks: the CUDA context, kernels, NCCL."""

    pages_us_per_gib: float | None = None
    pin_us_per_gib: float | None = None
    beside_allocator_bytes: int | None = None


class HostMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Bytes per second that one rank's share of host memory reads and writes, for copies and processors together, while
    the other ranks of its node do the same. ``slow_bytes_per_s``: the lowest value that it may have."""

    bytes_per_s: float
    slow_bytes_per_s: float | None = None


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Which links share hardware. ``nic_shares_pcie``: the NIC that carries all-gathers and host copies use one PCIe
    link."""

    nic_shares_pcie: bool = False


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Origin of a table: the program or the log format, its options or a description, and for a combined table which
    part comes from which table. ``estimated_from``: data sheet and batch from which the estimated parts were made."""

    program: str = ""
    description: str | None = None
    options: Facts = {}
    parts: dict[str, str] = {}
    estimated_from: tuple[HardwareSheet, MicroBatch] | None = None


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The environment in which the figures are valid.

    Attributes:
        created_at: date and time, ISO 8601.
        synthetic: True for tables that were not measured.
        hardware, software: as :func:`megatron_ext.runtime.machine.environment` returns them.
        world_sizes: parallel sizes and ranks per node of the measurement.
        model: what was computed: ``hidden_size``, ``seq_length``, ``micro_batch_size``, ``dtype``.
        notes: remarks for the reader, one line each.
    """

    created_at: str = ""
    synthetic: bool = False
    hardware: Facts | None = None
    software: Facts | None = None
    world_sizes: Facts | None = None
    model: Facts | None = None
    source: Source | None = None
    notes: tuple[str, ...] = ()


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """All figures of a table.

    ``reduce`` (gradient reduce-scatter by group bytes, or by bytes of the gradients if it says so) and ``optimizer``
    (one optimizer step by bytes of whole parameters of one rank) are needed only to predict a whole iteration. ``plan``
    and ``simulate`` refuse a table that lacks what they need. ``host_add`` is the addition of one float32 gradient
    shard to another in host memory, by bytes of the shard.

    ``host_step`` is the host's optimizer step of one group, by bytes of the whole group: gradients to the host, AdamW,
    parameters back. It is measured if the optimizer steps on the host. ``optimizer`` is then the step of all groups
    with the gradient norm and clipping. The points of ``host_step`` are Megatron's own step, one part after the other;
    its algorithms :data:`JOINED` and :data:`CAST_ON_DEVICE` are the step of a run. ``device_step`` is the same step of
    a group whose optimizer states are on the device.

    ``host_memory`` is shared by host copies, publishing, and adding and stepping on the host. ``launches`` and the
    launches of layers are time of the training thread, not of a device. ``all_reduce`` is no route: it is imported to
    compare algorithms by size.
    """

    schema_version: int
    kind: Literal["cost_table"]
    metadata: Metadata = Metadata()
    routes: Routes = Routes()
    publish: Publish = Publish()
    experts: ExpertCurves | None = None
    group_overhead: GroupOverhead = GroupOverhead()
    contention: tuple[Contention, ...] = ()
    compute: tuple[Compute, ...] = ()
    p2p: Curve | tuple[Point, ...] = ()
    reduce: MaybeCurve = None
    optimizer: MaybeCurve = None
    host_add: MaybeCurve = None
    host_step: MaybeCurve = None
    device_step: MaybeCurve = None
    all_reduce: MaybeCurve = None
    host_memory: HostMemory | None = None
    launches: Launches | None = None
    topology: Topology = Topology()
    set_up: SetUp = SetUp()


CURVES = (
    *(f"routes.{route}" for route in ROUTES),
    *("publish.cpu", "publish.nvme", "publish.internode", "experts.gpu", "experts.reduce", "p2p", "reduce"),
    *("optimizer", "host_add", "host_step", "device_step", "all_reduce"),
)
"""Names of all curves, for :func:`part_named`."""


def part_named(table: CostTable, name: str) -> Any:
    """A part of a table by its name: ``routes.gpu``, ``reduce``, ``set_up.pin_us_per_gib``; None if it is absent."""
    value: Any = table
    for field in name.split("."):
        value = getattr(value, field, None)
    return value


def with_parts(table: CostTable, parts: Mapping[str, Any]) -> CostTable:
    """``table`` with ``parts`` (by name) replaced."""
    held: dict[str, dict[str, Any]] = {"": {}}
    for name, value in parts.items():
        holder, _, field = name.rpartition(".")
        held.setdefault(holder, {})[field] = value
    own = held.pop("")
    return replace(table, **own, **{name: replace(getattr(table, name), **fields) for name, fields in held.items()})


def with_curves(table: CostTable, change: Callable[[str, Curve], Curve | None]) -> CostTable:
    """``table`` with every curve that it has replaced by ``change(name, curve)``."""
    given = {name: part_named(table, name) for name in CURVES}
    return with_parts(table, {name: change(name, curve) for name, curve in given.items() if isinstance(curve, Curve)})


def load(path) -> CostTable:
    """Read and check a cost table. Raises InputError; the message names file, field and value."""
    return check(json_files.load(path, CostTable, versioned="cost_table"), file=path)


def save(path, table: CostTable) -> None:
    json_files.save(path, table, indent=1)


def check(table: CostTable, *, file=None) -> CostTable:
    """Check a decoded table and return it in its normal form: a bare list of p2p points becomes a curve, and points
    are sorted by size.

    Raises:
        InputError: a figure is not valid. The message names the field and its value.
    """
    checker = Checker(file)
    if not isinstance(table.p2p, Curve):
        table = replace(table, p2p=Curve(points=table.p2p))

    def checked(name: str, curve: Curve) -> Curve:
        return with_points(curve, lambda field, points: checked_points(points, f"{name}.{field}", checker))

    table = with_curves(table, checked)
    if table.experts is not None:
        checker.at_least(1, table.experts.ranks, "experts.ranks")
    _check_figures(table, checker)
    for index, row in enumerate(table.contention):
        _check_contention(row, f"contention[{index}]", checker)
    _check_compute(table, checker)
    return table


NOT_NEGATIVE_US = (
    *("group_overhead.call_us", "set_up.pages_us_per_gib", "set_up.pin_us_per_gib"),
    *("launches.reduce_us", "launches.tensor_us"),
)


def _check_figures(table: CostTable, checker: Checker) -> None:
    """Check everything except curves and rows."""
    for name in NOT_NEGATIVE_US:
        checker.duration(part_named(table, name), name, zero=True)
    for name in ("set_up.beside_allocator_bytes", "host_memory.bytes_per_s", "host_memory.slow_bytes_per_s"):
        checker.positive(part_named(table, name), name)
    memory, launches = table.host_memory, table.launches
    if memory is not None and memory.slow_bytes_per_s is not None and memory.slow_bytes_per_s > memory.bytes_per_s:
        checker.refuse("must not be above bytes_per_s", "host_memory.slow_bytes_per_s", memory.slow_bytes_per_s)
    if launches is not None and not 1 <= launches.slowest <= MOST_SLOWDOWN:
        checker.refuse(f"expected 1 to {MOST_SLOWDOWN:g}", "launches.slowest", launches.slowest)


def _check_compute(table: CostTable, checker: Checker) -> None:
    seen = set()
    for index, row in enumerate(table.compute):
        field = f"compute[{index}]"
        by_place = row.pp_rank is not None and row.model_chunk_id is not None
        if by_place == (row.layer_kind is not None) or (row.pp_rank is None) != (row.model_chunk_id is None):
            checker.refuse("give either pp_rank and model_chunk_id, or layer_kind", field)
        for name in TIMES:
            checker.duration(getattr(row, name), f"{field}.{name}")
        checker.not_below("forward_us", row.forward_us, row.forward_p95_us, f"{field}.forward_p95_us")
        checker.not_below("backward_us", row.backward_us, row.backward_p95_us, f"{field}.backward_p95_us")
        checker.at_least(1, row.samples, f"{field}.samples")
        for name in ("activation_bytes", "recompute_bytes"):
            checker.size(getattr(row, name), f"{field}.{name}")
        place = (row.pp_rank, row.model_chunk_id, row.layer_kind)
        if place in seen:
            checker.refuse("appears twice", field)
        seen.add(place)


def _check_contention(row: Contention, field: str, checker: Checker) -> None:
    for name in ("measured", "busy"):
        if getattr(row, name) not in KINDS:
            checker.refuse(f"known: {', '.join(KINDS)}", f"{field}.{name}", getattr(row, name))
    checker.size(row.size_bytes, f"{field}.size_bytes")
    checker.positive(row.slowdown, f"{field}.slowdown")
    if not 1 / MOST_SLOWDOWN <= row.slowdown <= MOST_SLOWDOWN:
        checker.refuse(f"is implausible: expected at most {MOST_SLOWDOWN:g}", f"{field}.slowdown", row.slowdown)
    checker.duration(row.p50_us, f"{field}.p50_us")
