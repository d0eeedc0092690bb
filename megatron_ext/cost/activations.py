"""Replaces activation bytes that were counted from shapes by measured ones."""

import msgspec

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.workload.workload import Chunk, Workload
from megatron_ext.workload.workload_text import not_counted


def with_activations(workload: Workload, table: CostTable) -> Workload:
    """The workload with the table's ``activation_bytes``, in every chunk whose layer kinds were all measured.

    A chunk keeps its own count if only one of workload and table recomputes in the backward.
    """
    rows = {row.layer_kind: row for row in table.compute if row.activation_bytes is not None}

    def measured(chunk: Chunk) -> Chunk:
        layers = [rows[kind] for kind in chunk.layer_kinds if kind in rows]
        if not layers or len(layers) < len(chunk.layer_kinds):
            return chunk
        recomputed = max(row.recompute_bytes for row in layers)
        if chunk.activation_bytes and bool(chunk.recompute_bytes) != bool(recomputed):
            return chunk
        return msgspec.structs.replace(
            chunk, activation_bytes=tuple(row.activation_bytes for row in layers), recompute_bytes=recomputed
        )

    return msgspec.structs.replace(workload, chunks=tuple(map(measured, workload.chunks))) if rows else workload


def missing_activations(workload: Workload, table: CostTable) -> str | None:
    """A line about chunks whose activations neither ``workload`` nor ``table`` has; None if there are none."""
    missing = not_counted(with_activations(workload, table))
    return missing and f"{missing}; leave room for them in --limit-device-bytes of describe"
