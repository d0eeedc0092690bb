"""The environment a table's figures hold for, and what differs in another one.

An environment is three mappings, stored in a table's metadata: ``hardware`` (processor,
device, counts), ``software`` (versions) and ``world_sizes`` (parallel sizes, ranks a node).
:func:`megatron_ext.runtime.machine.environment` describes the machine it runs on.
"""

from collections import Counter
from collections.abc import Mapping
from math import prod

from megatron_ext.cost.cost_table import Metadata
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.facts import Facts
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import ITEM_BYTES, Workload

INSTANCES = "num_distributed_optimizer_instances"

PARTS = ("hardware", "software", "world_sizes")


def world_sizes(parallel: Parallel) -> dict[str, int]:
    """The sizes of a run that its costs depend on; ``data_parallel_size`` is that of one instance of the optimizer. A
    table is measured by one rank of every tensor-parallel group (beside experts the program knows no other
    parallelism), so of a node's ranks only those are counted."""
    experts = {"expert_data_parallel_size": parallel.expert_dp} if parallel.expert_dp != parallel.dp else {}
    return {
        **experts,
        "data_parallel_size": parallel.dp,
        INSTANCES: parallel.instances,
        "pipeline_model_parallel_size": parallel.pp,
        "ranks_per_node": max(min(parallel.node_size, parallel.world_size) // parallel.tensor_model_parallel_size, 1),
    }


def differences(metadata: Metadata, environment: Mapping[str, Facts]) -> list[str]:
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
            there = stored.get(name, 1 if name == INSTANCES else None) if isinstance(stored, Mapping) else None
            if there is None and here is not None:
                lines.append(f"{part}.{name}: the table does not say, here {here}")
            elif there != here:
                lines.append(f"{part}.{name}: table {there}, here {here}")
    return lines


def run_differences(metadata: Metadata, workload: Workload) -> list[str]:
    """What the table says of the run that it was measured for and ``workload`` says otherwise.

    Parallel sizes, and of measured compute the precision and the bytes of a message between
    stages. What the table does not say (imported logs, published figures, tables by hand) is not
    compared, nor is a synthetic table.
    """
    return size_differences(metadata, world_sizes(workload.parallel)) + model_differences(metadata, workload)


def size_differences(metadata: Metadata, sizes: Mapping[str, object]) -> list[str]:
    """The part of :func:`run_differences` that options alone show; ``sizes`` by Megatron's names, or None."""
    lines = []
    for part in ("world_sizes", "model"):
        stored = getattr(metadata, part)
        for name, here in sizes.items():
            there = stored.get(name) if isinstance(stored, Mapping) and not metadata.synthetic else None
            if None not in (here, there) and there != here:
                lines.append(f"{part}.{name}: table {there}, here {here}")
    return lines


def model_differences(metadata: Metadata, workload: Workload) -> list[str]:
    """What compute was measured of, where ``workload`` says otherwise: precision, bytes of a message."""
    model, lines = metadata.model, []
    if metadata.synthetic or not isinstance(model, Mapping):
        return []
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
        message = prod(shape) * item_bytes
        # With sequence parallelism a rank sends its part of the sequence; the workload does not say which it is.
        if workload.p2p_bytes not in (message, message // workload.parallel.tensor_model_parallel_size):
            lines.append(
                f"model: table {' x '.join(map(str, shape))} (sequence x micro-batch x hidden), {message} bytes a "
                f"message, here {workload.p2p_bytes}"
            )
    return lines


def refuse(lines: list[str], *, allow: bool, file=None, how: str = "allow it") -> list[str]:
    """``lines``, if there are none or they are allowed; ``how`` says by what. Raises InputError naming all."""
    if lines and not allow:
        raise InputError(
            f"was measured in another environment ({'; '.join(lines)}); measure here or {how}",
            file=file,
            field="metadata",
        )
    return lines
