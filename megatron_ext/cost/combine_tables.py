"""One table made from several: for example links from the cluster and compute from one GPU."""

from collections.abc import Mapping
from math import prod
from typing import Any

from megatron_ext.cost.cost_table import CostTable, Curve, ExpertCurves, Metadata, Source, check, part_named, with_parts
from megatron_ext.cost.curve import has_points
from megatron_ext.cost.environment import INSTANCES, TENSOR
from megatron_ext.formats.errors import InputError
from megatron_ext.workload.route import ROUTES

LINKS = (
    *(*(f"routes.{name}" for name in ROUTES), "publish.cpu", "publish.nvme", "publish.internode", "experts"),
    *("group_overhead.call_us", "contention", "p2p", "reduce", "all_reduce", "topology.nic_shares_pcie"),
    *("set_up.pages_us_per_gib", "set_up.pin_us_per_gib", "set_up.beside_allocator_bytes"),
)
COMPUTE = ("compute", "optimizer", "host_add", "host_step", "device_step", "host_memory", "launches")
PARTS = LINKS + COMPUTE


def combine(tables: Mapping[str, CostTable], chosen: Mapping[str, str] | None = None) -> CostTable:
    """Take every part from one of ``tables``, which are in order of preference.

    Args:
        tables: name (usually the path) to table.
        chosen: part (``links`` or ``compute``) to the name of the table that must provide it.

    Returns:
        A table whose ``metadata.source.parts`` says which part came from which table.
        Figures of one curve always come from one table.

    Raises:
        InputError: a part is unknown, or the chosen table lacks it.
    """
    chosen = dict(chosen or {})
    unknown = sorted(set(chosen) - set(PARTS) - {"links", "compute"})
    if unknown:
        raise InputError(f"known parts: links, compute, {', '.join(PARTS)}", field=unknown[0], value=chosen[unknown[0]])
    for whole, members in (("links", LINKS), ("compute", COMPUTE)):
        name = chosen.get(whole)
        if name is not None:
            if not any(has(part_named(tables[name], part)) for part in members):
                raise InputError("has none", file=name, field=whole)
            chosen |= {part: name for part in members if part not in chosen and has(part_named(tables[name], part))}
    chosen.pop("links", None)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for part in PARTS:
        if part in chosen:
            name = chosen[part]
            value = part_named(tables[name], part)
            if part == "experts" and value is None:
                value = _gathers_as_of_experts(tables[name], name)
            if not has(value):
                raise InputError("has none", file=name, field=part)
            values[part], origin[part] = value, name
        elif found := [(name, value) for name, table in tables.items() if has(value := part_named(table, part))]:
            origin[part], values[part] = found[0]
    notes = _leave_out_other_network(tables, values, origin) if "contention" not in chosen else []
    first = next(iter(tables.values()))
    empty = CostTable(schema_version=first.schema_version, kind="cost_table", metadata=_metadata(tables, origin, notes))
    return check(with_parts(empty, values))


def _gathers_as_of_experts(table: CostTable, name: str) -> ExpertCurves:
    """Curves of collectives that were measured among as many ranks as share the shards of an expert."""
    ranks = (table.metadata.world_sizes or {}).get("data_parallel_size")
    if not isinstance(ranks, int) or not (has(table.routes.gpu) and has(table.reduce)):
        raise InputError("needs routes.gpu, reduce and a known data_parallel_size", file=name, field="experts")
    return ExpertCurves(ranks=ranks, gpu=table.routes.gpu, reduce=table.reduce)


NETWORKED = {"gpu", "reduce", "p2p", "publish"}
"""Links that cross the network if a run spans several nodes."""


def _leave_out_other_network(tables: Mapping[str, CostTable], values: dict, origin: dict) -> list[str]:
    """Remove rows of contention that were measured with another network than the one that all-gathers use here.

    Between nodes, an all-gather and a host copy share a GPU's PCIe link. Inside a node they need not share it. So the
    slowdown of one by the other must come from the cluster. Returns a note if rows were removed.
    """
    if "contention" not in origin or "routes.gpu" not in origin:
        return []
    spans = [_spans_nodes(tables[origin[part]]) for part in ("routes.gpu", "contention")]
    kept = tuple(row for row in values["contention"] if not {row.measured, row.busy} & NETWORKED)
    if None in spans or spans[0] == spans[1] or kept == values["contention"]:
        return []
    values["contention"] = kept
    where = ["between nodes" if span else "inside a node" for span in spans]
    return [
        f"contention of {', '.join(sorted(NETWORKED))} from {origin['contention']} left out: measured {where[1]}, "
        f"all-gathers {where[0]}"
    ]


def _spans_nodes(table: CostTable) -> bool | None:
    """Whether the table was measured on several nodes; None if the table does not say."""
    sizes = table.metadata.world_sizes or {}
    names = ("data_parallel_size", "pipeline_model_parallel_size", "ranks_per_node")
    data, pipeline, node = (sizes.get(name) for name in names)
    others = [sizes.get(name, 1) for name in (TENSOR, INSTANCES)]
    if not isinstance(data, int) or not isinstance(pipeline, int) or not isinstance(node, int):
        return None
    return data * pipeline * prod(size for size in others if isinstance(size, int)) > node


def has(value) -> bool:
    if isinstance(value, Curve):
        return has_points(value)
    return value is not None and value is not False and value != ()


def _metadata(tables: Mapping[str, CostTable], origin: Mapping[str, str], more: list[str]) -> Metadata:
    """Metadata of the combined table. Hardware, software and world sizes are those of the tables that are used. If
    these differ, they are those of the links' table, and a note says so. ``more``: further notes."""
    used = [name for name in tables if name in origin.values()]
    links_from = origin.get("routes.gpu") or origin.get("routes.cpu") or (used[0] if used else next(iter(tables)))
    base = tables[links_from].metadata
    notes = [f"{name}: {note}" for name in used for note in tables[name].metadata.notes] + more
    for name in used:
        for part in ("hardware", "software", "world_sizes"):
            other = getattr(tables[name].metadata, part)
            if name != links_from and other is not None and other != getattr(base, part):
                parts = ", ".join(sorted(p for p, source in origin.items() if source == name))
                notes.append(f"{parts} from {name}, measured on other {part}: {other}")
    sheet = next((s.estimated_from for name in used if (s := tables[name].metadata.source) and s.estimated_from), None)
    return Metadata(
        created_at=max(tables[name].metadata.created_at for name in used) if used else "",
        synthetic=any(tables[name].metadata.synthetic for name in used),
        hardware=base.hardware,
        software=base.software,
        world_sizes=base.world_sizes,
        model=tables[origin["compute"]].metadata.model if "compute" in origin else None,
        source=Source(program="megatron-ext cost combine", parts=dict(origin), estimated_from=sheet),
        notes=tuple(notes),
    )
