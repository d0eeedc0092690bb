"""The environment in which a table's figures are valid, and its differences from another environment.

An environment consists of three mappings, stored in a table's metadata: ``hardware`` (processor, device, counts),
``software`` (versions) and ``world_sizes`` (parallel sizes, ranks per node).
:func:`megatron_ext.runtime.machine.environment` describes the machine that it runs on.
"""

from collections import Counter
from collections.abc import Mapping
from math import prod

from megatron_ext.cost.cost_table import Metadata
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.facts import CAUTION, NUMA_NODES, Facts
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import ITEM_BYTES, Workload, fingerprint

INSTANCES = "num_distributed_optimizer_instances"
TENSOR = "tensor_model_parallel_size"
USUAL = {INSTANCES: 1, NUMA_NODES: 1, TENSOR: 1}
"""Values of a table that does not have these fields, such as a table of an earlier release."""

PARTS = ("hardware", "software", "world_sizes")

SEQUENCE_PARTS = "sequence_parts"
"""Field of a table's model: the number of context-parallel ranks that divide the sequence, if they do."""


def world_sizes(parallel: Parallel) -> dict[str, int]:
    """The sizes of a run that its costs depend on; ``data_parallel_size`` is that of one instance of the optimizer."""
    experts = {"expert_data_parallel_size": parallel.expert_dp} if parallel.expert_dp != parallel.dp else {}
    return {
        **experts,
        "data_parallel_size": parallel.dp,
        INSTANCES: parallel.instances,
        "pipeline_model_parallel_size": parallel.pp,
        TENSOR: parallel.tensor_model_parallel_size,
        "ranks_per_node": min(parallel.node_size, parallel.world_size),
    }


def environment_differences(metadata: Metadata, environment: Mapping[str, Facts]) -> list[str]:
    """The differences, one line each: ``software.torch: table 2.6.0, here 2.13.0``.

    Only fields that ``environment`` has are compared. A field that the table lacks is a difference as well. For the
    machine it is also compared whether figures were measured on its own links
    (:data:`megatron_ext.formats.facts.CAUTION`). A synthetic table (``metadata.synthetic``) is valid for no machine,
    and a line says so.
    """
    if metadata.synthetic:
        return ["synthetic: the table was not measured"]
    lines = []
    for part in PARTS:
        stored, present = getattr(metadata, part) or {}, environment.get(part, {})
        for name in (*present, *({CAUTION} & stored.keys() - present.keys() if present else ())):
            here, there = present.get(name), stored.get(name, USUAL.get(name) if stored else None)
            silent = there is None or (name == NUMA_NODES and name not in stored)
            if silent and here not in (None, there):
                lines.append(f"{part}.{name}: the table does not say, here {here}")
            elif there != here:
                lines.append(f"{part}.{name}: table {there}, here {here}")
    return lines


def run_differences(metadata: Metadata, workload: Workload) -> list[str]:
    """Differences between ``workload`` and the run that the table was measured or estimated for.

    Parallel sizes are compared. For measured compute, the precision and the bytes of a message between stages are
    compared. For estimated compute, the model of these chunks is compared, and where its optimizer steps. Fields that
    the table lacks (imported logs, published figures) are not compared, nor is a synthetic table that no program made.
    """
    return size_differences(metadata, world_sizes(workload.parallel)) + model_differences(metadata, workload)


def size_differences(metadata: Metadata, sizes: Mapping[str, object]) -> list[str]:
    """The part of :func:`run_differences` that follows from options alone. ``sizes``: by Megatron's names; a value may
    be None."""
    lines = []
    for part in ("world_sizes", "model"):
        stored = getattr(metadata, part)
        for name, here in sizes.items():
            there = stored.get(name) if isinstance(stored, Mapping) and not _by_hand(metadata) else None
            if None not in (here, there) and there != here:
                lines.append(f"{part}.{name}: table {there}, here {here}")
    return lines


def model_differences(metadata: Metadata, workload: Workload) -> list[str]:
    """Differences between ``workload`` and the model whose compute the table has: precision, message bytes, whole
    model."""
    model, lines = metadata.model, []
    if _by_hand(metadata) or not isinstance(model, Mapping):
        return []
    for name, here in estimated_of(workload).items():
        if model.get(name, here) != here:
            lines.append(f"model.{name}: table {model[name]}, here {here}")
    dtypes: Counter[str] = Counter()
    for chunk in workload.chunks:
        for parameter in chunk.parameters:
            dtypes[parameter.dtype] += parameter.bytes
    dtype = dtypes.most_common(1)[0][0] if dtypes else None
    if dtype is not None and model.get("dtype") not in (None, dtype):
        lines.append(f"model.dtype: table {model['dtype']}, here {dtype}")
    sizes = [model.get(name) for name in ("seq_length", "micro_batch_size", "hidden_size")]
    shape = [size for size in sizes if isinstance(size, int)]
    item_bytes = ITEM_BYTES.get(str(model.get("dtype")))
    if workload.p2p_bytes and item_bytes is not None and len(shape) == len(sizes):
        parts = model.get(SEQUENCE_PARTS, 1)
        message = prod(shape) * item_bytes // (parts if isinstance(parts, int) else 1)
        # With sequence parallelism a rank sends its part of the sequence. The workload does not say whether it is used.
        if workload.p2p_bytes not in (message, message // workload.parallel.tensor_model_parallel_size):
            lines.append(
                f"model: table {' x '.join(map(str, shape))} (sequence x micro-batch x hidden), {message} bytes per "
                f"message, here {workload.p2p_bytes}"
            )
    return lines


def _by_hand(metadata: Metadata) -> bool:
    return metadata.synthetic and metadata.source is None


def estimated_of(workload: Workload) -> dict[str, str | bool]:
    """The model of an estimate, for its table's ``model``."""
    return {"fingerprint": fingerprint(workload)[:12], "optimizer_on_host": workload.optimizer.on_host}


def refuse(lines: list[str], *, allow: bool, file=None, how: str = "allow it") -> list[str]:
    """Return ``lines`` if there are none or if they are allowed. Otherwise raises InputError with all lines; ``how``
    says how to allow them."""
    if lines and not allow:
        said = f"was measured in another environment ({'; '.join(lines)}); measure here or {how}"
        raise InputError(said, file=file, field="metadata")
    return lines
