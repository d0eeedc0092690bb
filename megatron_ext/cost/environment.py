"""The environment a table's figures hold for, and what differs in another one.

An environment is three mappings, stored in a table's metadata: ``hardware`` (processor,
device, counts), ``software`` (versions) and ``world_sizes`` (parallel sizes, ranks a node).
:func:`megatron_ext.measure.machine.environment` describes the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.cost.model import Metadata
from megatron_ext.errors import InputError
from megatron_ext.workload.parallel import Parallel

PARTS = ("hardware", "software", "world_sizes")


def world_sizes(parallel: Parallel) -> dict[str, int]:
    """The sizes of a run that its costs depend on."""
    return {
        "data_parallel_size": parallel.dp,
        "pipeline_model_parallel_size": parallel.pp,
        "ranks_per_node": min(parallel.node_size, parallel.world_size),
    }


def differences(metadata: Metadata, environment: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs, one line each: ``software.torch: table 2.6.0, here 2.13.0``.

    Only what ``environment`` names is compared; a table that does not say is a difference too.
    A synthetic table (``metadata.synthetic``) holds for no machine, and is said to.
    """
    if metadata.synthetic:
        return ["synthetic: the table was not measured"]
    lines = []
    for part in PARTS:
        stored = getattr(metadata, part)
        for name, here in environment.get(part, {}).items():
            there = stored.get(name) if isinstance(stored, Mapping) else None
            if there is None and here is not None:
                lines.append(f"{part}.{name}: the table does not say, here {here}")
            elif there != here:
                lines.append(f"{part}.{name}: table {there}, here {here}")
    return lines


def require_match(metadata: Metadata, environment: Mapping[str, Mapping[str, Any]], *, allow: bool = False, file=None) -> list[str]:
    """The differences, if ``allow``; otherwise an error where there are any.

    Raises:
        InputError: naming everything that differs.
    """
    lines = differences(metadata, environment)
    if lines and not allow:
        raise InputError(
            f"was measured in another environment ({'; '.join(lines)}); measure here or allow it", file=file, field="metadata"
        )
    return lines
