"""From what the ranks measured to a cost table, which says what it holds for and where it wavers."""

from __future__ import annotations

from datetime import datetime, timezone
from statistics import median

import msgspec

from megatron_ext.cost.model import (
    SCHEMA_VERSION, Compute, Contention, CostTable, Curve, GroupOverhead, Metadata, Point, Publish, Routes, Topology, check,
)  # fmt: skip
from megatron_ext.measure.operations import CoalescedGather
from megatron_ext.measure.options import MIB, Options
from megatron_ext.measure.processors import TURNS
from megatron_ext.runtime.machine import environment
from megatron_ext.workload.nodes import crossing_bytes
from megatron_ext.workload.route import HIERARCHICAL

WAVERS = 0.10
"""A point is noted in the table where the medians of its quarters (in the order of time) lie further
apart than this. The median of all is known about twice as well as that of a quarter, so another
measurement then rarely differs by more."""

OTHERS = 0.1
"""Processors that others may use before the table says so."""

MEDIANS = "medians_us"


def assemble(options: Options, raw: dict) -> CostTable:
    """Build and check the table from :func:`megatron_ext.measure.launch.run`'s result."""
    curves = raw["curves"]
    here = environment(options.device)
    world_sizes = {
        "data_parallel_size": options.data_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "ranks_per_node": options.node_size,
    }
    backend = here["software"]["backend"]

    def curve(name: str, source: str, **settings) -> Curve | None:
        if name not in curves:
            return None
        return Curve(points=_points(curves[name], slowdown), source=f"measured: {source}", settings=settings)

    at_once = f"all {options.world_size} ranks at once"
    compute = raw.get("compute", {})
    slowdown = compute.get("slowdown", 1.0)
    table = CostTable(
        schema_version=SCHEMA_VERSION,
        kind="cost_table",
        metadata=Metadata(
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            hardware=here["hardware"],
            software=here["software"],
            world_sizes=world_sizes,
            model=raw.get("compute", {}).get("model"),
            source={"program": "megatron-ext measure", "options": msgspec.to_builtins(options), **_pace(compute)},
            notes=(*notes(raw), *_nodes(options)),
        ),
        routes=Routes(
            gpu=_with_hierarchical(curve("gpu", f"{backend} all-gather in place, {at_once}"), curve("hierarchical", "")),
            cpu=curve("cpu", f"copy of the whole group from node-shared host memory, {at_once}"),
            nvme=_nvme(raw, "nvme", f"drive to pinned slot to device, {at_once}, each from a file of its own"),
        ),
        publish=Publish(
            cpu=curve("publish", f"own shard into node-shared host memory, {at_once}, until the last of a node"),
            nvme=_nvme(raw, "publish_nvme", f"own shard onto the drive, {at_once}, until the last of a node"),
            internode=_internode(curves, options, at_once, slowdown),
        ),
        group_overhead=GroupOverhead(
            call_us=_call_us(curves.get("gpu", [])),
            flatten=curve("flatten", f"one copy on the device, {at_once}"),
            coalesced=curve("coalesced", f"{backend} all-gather of several groups in one call, {at_once}", groups=CoalescedGather.GROUPS),
        ),
        contention=tuple(Contention(**row) for row in raw.get("contention", [])),
        compute=tuple(msgspec.convert(row, Compute) for row in compute.get("rows", [])),
        p2p=curve("p2p", f"half a {backend} message there and back, {at_once}") or (),
        reduce=curve("reduce", f"{backend} reduce-scatter of float32 in place, {at_once}"),
        optimizer=curve("optimizer", f"AdamW with clipping on the shard, {at_once}"),
        topology=Topology(processors_per_node=compute.get("processors_per_node"), nodes_sharing=compute.get("nodes_sharing")),
    )
    return check(table)


def _pace(compute: dict) -> dict:
    """How fast all ranks at once computed, in the order of time: when a turn ended (Unix time, s) and what a walk through
    all layers took in it (us)."""
    return {"pace": [[round(ended_s, 2), round(us, 1)] for ended_s, us in compute["pace"]]} if compute.get("pace") else {}


def _points(rows: list[dict], slowdown: float = 1.0) -> tuple[Point, ...]:
    """Processor time was measured on all ranks at once, which share caches and memory; a table
    holds it as if alone, as compute is: ``topology.processors_per_node`` has the slowdown."""
    rows = [row | {"processor_us": row["processor_us"] / slowdown} if "processor_us" in row else row for row in rows]
    return tuple(Point(**{name: value for name, value in row.items() if name in Point.__struct_fields__}) for row in rows)


def _with_hierarchical(gpu: Curve | None, hierarchical: Curve | None) -> Curve | None:
    if gpu is None or hierarchical is None:
        return gpu
    return msgspec.structs.replace(gpu, algorithms={HIERARCHICAL: hierarchical.points})


def _internode(curves: dict, options: Options, at_once: str, slowdown: float) -> Curve | None:
    """By the bytes that enter each node, which is what a plan asks for."""
    if "internode" not in curves:
        return None
    rows = [row | {"size_bytes": crossing_bytes(row["size_bytes"], options.nodes)} for row in curves["internode"]]
    return Curve(points=_points(rows, slowdown), source=f"measured: shards exchanged with the counterparts on the other nodes, {at_once}, until the last of a node", settings={"nodes": options.nodes})


def _nodes(options: Options) -> list[str]:
    """What cannot be measured of several nodes, where there are several."""
    if options.nodes == 0 and "internode" in options.links:
        return ["publish.internode: not measured: the nodes do not hold equally many ranks of every data-parallel group"]
    return []


def _nvme(raw: dict, name: str, source: str) -> Curve | None:
    if name not in raw["curves"]:
        return None
    return Curve(points=_points(raw["curves"][name], raw.get("compute", {}).get("slowdown", 1.0)), source=f"measured: {source}", settings=raw["nvme"]["settings"])


def _call_us(rows: list[dict]) -> float | None:
    """What issuing costs the calling thread, whatever the size: the median over the curve."""
    return median(row["issued_us"] for row in rows) if rows else None


def notes(raw: dict) -> list[str]:
    """Where medians waver, for sizes of 1 MiB and more, what there was no time for, and
    who else used the processors: the table says so itself."""
    lines = []
    others = raw.get("others_processors", 0.0)
    if others > OTHERS:
        lines.append(f"other programs used {others:.1f} processors meanwhile: times are longer than on an idle machine")
    unmeasured = [f"{measured} beside {busy}" for measured, busy in raw.get("unmeasured_pairs", [])]
    if unmeasured:
        lines.append(f"out of time, contention not measured: {', '.join(unmeasured)}")
    once: list[str] = []
    for name, rows in raw["curves"].items():
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
            lines.append(f"{name}: medians waver by more than {WAVERS:.0%} at {sizes} MiB, most by {worst[1]:.0%} at {worst[0] / MIB:.4g} MiB")
    if once:
        lines.append(f"out of time, only one pass over some sizes, so how well they repeat is not known: {', '.join(once)}")
    turns = raw.get("compute", {}).get("turns", TURNS)
    if turns < TURNS:
        lines.append(f"compute: a walk through all layers takes so long that there was time for {turns}; --seconds gives it more")
    drift = raw.get("compute", {}).get("drift", 0.0)
    if drift > WAVERS:
        lines.append(f"compute: turns of one rank alone differ by {drift:.0%}")
    return lines + list((raw.get("nvme") or {}).get("notes", []))
