"""Builds a cost table from the ranks' measurements. The table says what it is valid for and where medians vary."""

from collections.abc import Iterator
from datetime import datetime, timezone
from statistics import median

import msgspec

from megatron_ext.cost import cost_table
from megatron_ext.cost.environment import world_sizes
from megatron_ext.formats.facts import RANKS_PER_DEVICE, shared_device
from megatron_ext.measure import scaled_sizes
from megatron_ext.measure.compute_rounds import ROUNDS
from megatron_ext.measure.options import MIB, MOST_OVER, OF_EXPERTS, Options
from megatron_ext.runtime.machine import environment
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.nodes import crossing_bytes

WAVERS = 0.10
"""The table has a note for a point if the medians of its quarters (in the order of time) lie further
apart than this. The median of all samples is known about twice as well as that of a quarter, so a second
measurement rarely differs by more than the quarters do."""

MEDIANS = "medians_us"

EXPERTS_SOURCE = "as routes.gpu and reduce, of experts, {at_once}"


SOURCES = {
    "gpu": ("routes.gpu", "{backend} all-gather in place, {at_once}"),
    "cpu": ("routes.cpu", "copy of the whole group from node-shared host memory, {at_once}"),
    "cpu_shard": ("routes.cpu_shard", "own shard from host memory, then {backend} all-gather, {at_once}"),
    "nvme": ("routes.nvme", "drive to pinned slot to device, {at_once}, each from a file of its own"),
    "publish": ("publish.cpu", "own shard into node-shared host memory, {at_once}, until the last of a node"),
    "publish_nvme": ("publish.nvme", "own shard onto the drive, {at_once}, until the last of a node"),
    "internode": (
        "publish.internode",
        "shards exchanged with the counterparts on the other nodes, {at_once}, until the last of a node",
    ),
    "p2p": ("p2p", "half a {backend} message there and back, {at_once}"),
    "reduce": ("reduce", "{backend} reduce-scatter of float32 in place, {at_once}"),
    **{f"experts_{name}": (f"experts.{name}", EXPERTS_SOURCE) for name in ("gpu", "reduce")},
    "optimizer": ("optimizer", "AdamW with clipping on the shard{on_host}, {at_once}"),
    "host_step": ("host_step", "gradients to the host, Megatron's AdamW there, parameters back, {at_once}"),
    "device_step": ("device_step", "AdamW on the device, parameters cast, {at_once}"),
    "host_add": ("host_add", "one float32 gradient shard added to another in host memory, {at_once}"),
}
"""Name of the operation -> (curve of the table, description of what was measured)."""


def assemble_table(options: Options, raw: dict) -> cost_table.CostTable:
    """Build and check the table from :func:`megatron_ext.measure.local_launch.run`'s result."""
    here, curves, sharing = environment(options.device), raw["curves"], raw.get(RANKS_PER_DEVICE, 1)
    experts = options.expert_data_parallel_size
    sizes = world_sizes(options.parallel) | ({"expert_data_parallel_size": experts} if experts is not None else {})
    compute = raw.get("compute", {})
    of_experts = cost_table.ExpertCurves(ranks=experts or 1)
    table = cost_table.CostTable(
        schema_version=cost_table.SCHEMA_VERSION,
        kind="cost_table",
        metadata=cost_table.Metadata(
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            hardware={**here["hardware"], **({RANKS_PER_DEVICE: sharing} if sharing > 1 else {})},
            software=here["software"],
            world_sizes=sizes,
            model=compute.get("model"),
            source=cost_table.Source(program="megatron-ext measure", options=options.facts()),
            notes=(*notes(raw), *_notes_of_options(options)),
        ),
        group_overhead=cost_table.GroupOverhead(call_us=_call_us(curves.get("gpu", []))),
        set_up=cost_table.SetUp(**raw.get("set_up", {})),
        contention=tuple(cost_table.Contention(**row) for row in raw.get("contention", [])),
        compute=tuple(_of_part(row, options.sequence_parts) for row in compute.get("rows", [])),
        experts=of_experts if curves.keys() & {*OF_EXPERTS} else None,
        host_memory=cost_table.HostMemory(**raw["host_memory"]) if raw.get("host_memory") else None,
        launches=_launches(options, curves),
    )
    return cost_table.check(cost_table.with_parts(table, _curves(options, raw, here["software"]["backend"])))


def _curves(options: Options, raw: dict, backend: object) -> dict[str, cost_table.Curve]:
    """The curves, by name in the table."""
    points = {name: _points(rows, options.nodes if name == "internode" else 0) for name, rows in raw["curves"].items()}
    at_once = f"all {options.world_size} ranks at once"
    on_host = " in host memory" if options.optimizer_on_host else ""
    facts = {"backend": backend, "at_once": at_once, "on_host": on_host}
    found = {}
    for name in points.keys() & SOURCES.keys():
        part, source = SOURCES[name]
        reads = DriveReads(**raw["nvme"]["settings"]) if name in ("nvme", "publish_nvme") else None
        # The operation that measures an algorithm has the algorithm's name. For a step, the curve's comes before it.
        chosen = [(name, own) for name in cost_table.CHOSEN.get(part, ()) for own in (name, f"{part}_{name}")]
        named = {algorithm: points[own] for algorithm, own in chosen if own in points}
        said = f"measured: {source.format(**facts)}"
        found[part] = cost_table.Curve(points=points[name], source=said, reads=reads, algorithms=named)
    return found


DIVIDED = ("forward_us", "forward_p95_us", "backward_us", "backward_p95_us", "activation_bytes", "recompute_bytes")
"""Fields of a row of compute that are divided among context-parallel ranks."""


def _of_part(row: dict, parts: int) -> cost_table.Compute:
    """The row of one of ``parts`` context-parallel ranks. All of them have the same number of tokens. Because Megatron
    gives each rank two pieces of every sequence, they also have the same number of pairs of tokens in attention
    (core/utils.py, get_batch_on_this_cp_rank)."""
    of_rank = {name: type(row[name])(row[name] / parts) for name in DIVIDED if parts > 1 and row.get(name) is not None}
    return msgspec.convert({**row, **of_rank}, cost_table.Compute)


def _notes_of_options(options: Options) -> Iterator[str]:
    """Notes on figures that cannot be measured between these nodes, by these ranks, or with whole sequences."""
    if options.nodes == 0 and "internode" in options.links:
        uneven = "the nodes do not hold equally many ranks of every data-parallel group"
        yield f"publish.internode: not measured: {uneven}"
    if options.sequence_parts > 1:
        timed = f"timed on whole sequences and divided by {options.sequence_parts} context-parallel ranks"
        yield f"compute: layers were {timed}; the exchange of keys and values is not in them"


def _points(rows: list[dict], nodes: int) -> tuple[cost_table.Point, ...]:
    """The points of one curve. Between ``nodes`` sizes become the bytes that enter each node: plans look these up."""
    fields = cost_table.Point.__struct_fields__
    points = [cost_table.Point(**{name: row[name] for name in fields if name in row}) for row in rows]
    size = lambda point: crossing_bytes(point.size_bytes, nodes) if nodes else point.size_bytes
    return tuple(msgspec.structs.replace(point, size_bytes=size(point)) for point in points)


def _call_us(rows: list[dict]) -> float | None:
    """Microseconds for which issuing keeps the calling thread, independent of the size: the median over the curve."""
    return median(row["issued_us"] for row in rows) if rows else None


def _launches(options: Options, curves: dict) -> cost_table.Launches | None:
    """Microseconds of the training thread for a reduce and for one parameter of the optimizer's step. None without a
    device, because only a device has launches, and if either was not measured."""
    last = (curves.get("optimizer") or [{}])[-1]
    if "issued_us" not in last or "reduce" not in curves or options.optimizer_on_host:
        return None
    issued_bytes = last.get("scaled_from", last["size_bytes"])  # a scaled row has the launches of the measured one
    shard = options.elements(issued_bytes) // options.data_parallel_size
    tensors = -(-shard // max(min(options.hidden_size**2, shard), 1))
    return cost_table.Launches(reduce_us=_call_us(curves["reduce"]) or 0.0, tensor_us=last["issued_us"] / tensors)


def notes(raw: dict) -> list[str]:
    """Notes that the table stores: where medians vary (for sizes of 1 MiB and more), and what there was no time for."""
    lines = []
    if raw.get(RANKS_PER_DEVICE, 1) > 1:
        lines.append(shared_device(raw[RANKS_PER_DEVICE]))
    seconds = raw.get("seconds")
    if seconds is not None and seconds["taken"] > MOST_OVER * seconds["asked"]:
        longest = sorted(seconds["of"].items(), key=lambda one: -one[1])[:3]
        lines.append(
            f"took {seconds['taken']:.0f} s, not the {seconds['asked']:.0f} s asked for, because everything is "
            f"measured at least once; longest: {', '.join(f'{name} ({taken:.0f} s)' for name, taken in longest)}"
        )
    if raw.get("given_up"):
        lines.append(f"given up in: {raw['given_up']}, which had not ended; later measurements are missing")
    if raw.get("symmetric_refused"):
        lines.append(f"all-gathers by copy engines not measured: {raw['symmetric_refused']}")
    unmeasured = [f"{measured} while {busy} is busy" for measured, busy in raw.get("unmeasured_pairs", [])]
    if unmeasured:
        lines.append(f"out of time, contention not measured: {', '.join(unmeasured)}")
    if raw.get("unsafe_pairs"):
        names = ", ".join(sorted({name for pair in raw["unsafe_pairs"] for name in pair}))
        lines.append(f"CUDA_DEVICE_MAX_CONNECTIONS is 1: contention among {names} cannot be measured")
    once: list[str] = []
    for name, rows in raw["curves"].items():
        lines += scaled_sizes.notes(name, rows, raw.get("largest", {}).get(name))
        wavering = []
        if any(row["size_bytes"] >= MIB and row["passes"] == 1 and not row.get("refined") for row in rows):
            once.append(name)
        for row in rows:
            medians = row[MEDIANS]
            spread = max(medians) / min(medians) - 1 if len(medians) > 1 else 0.0
            if row["size_bytes"] >= MIB and spread > WAVERS:
                wavering.append((row["size_bytes"], spread))
        if wavering:
            worst = max(wavering, key=lambda pair: pair[1])
            sizes = ", ".join(f"{size / MIB:.4g}" for size, _ in wavering)
            lines.append(
                f"{name}: medians vary by more than {WAVERS:.0%} at {sizes} MiB, the most by {worst[1]:.0%} at "
                f"{worst[0] / MIB:.4g} MiB"
            )
    if once:
        passes = "only one pass over some sizes, so their repeatability is not known"
        lines.append(f"out of time: {passes}: {', '.join(once)}")
    rounds = raw.get("compute", {}).get("rounds", ROUNDS)
    if rounds < ROUNDS:
        lines.append(f"compute: micro-batches are so long that only {rounds} rounds fit; use a larger --seconds")
    drift = raw.get("compute", {}).get("drift", 0.0)
    if drift > WAVERS:
        lines.append(f"compute: rounds differ by {drift:.0%}")
    return lines + list((raw.get("nvme") or {}).get("notes", []))
