"""Which parameters of a chunk share a bucket, by Megatron's own rule and cut at layers.

Source: Megatron-LM ``megatron/core/distributed/param_and_grad_buffer.py`` (one buffer a dtype, experts apart;
the shared embedding has a bucket of its own; a bucket is closed when it is full, from the last parameter on) and
``distributed_data_parallel.py`` (the size of a bucket, for experts too; one bucket a chunk except in the first stage).
"""

from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.workload import Chunk

LEAST_BUCKET, BUCKET_OF_A_RANK = 40_000_000, 1_000_000
"""Elements: Megatron fills a bucket to the larger of the first and the second times the data-parallel size."""


def stock_buckets(chunk: Chunk, data_parallel_size: int, elements: int | None = None) -> list[list]:
    """Parameters of a chunk as Megatron buckets them without a schedule, in execution order.

    Args:
        elements: Megatron's ``bucket_size``; None is its default.
    """
    if chunk.pp_rank or chunk.model_chunk_id:
        return buckets(chunk)
    if elements is None:
        elements = max(LEAST_BUCKET, BUCKET_OF_A_RANK * data_parallel_size)
    found = []
    for members in buckets(chunk):
        parts, numel = [[]], 0
        for parameter in reversed(members):
            if numel >= elements:
                parts.append([])
                numel = 0
            parts[-1].append(parameter)
            numel += parameter.bytes // ITEM_BYTES[parameter.dtype]
        found += [part[::-1] for part in reversed(parts)]
    return found


def buckets(chunk: Chunk, by_layer: bool = False) -> list[list]:
    """Parameters that may share a bucket: by dtype, experts and the shared embedding apart."""
    found: dict[tuple, list] = {}
    for parameter in chunk.parameters:
        alone = parameter.shared_embedding or (by_layer and parameter.borrowed_by)
        key = (parameter.expert, parameter.dtype, parameter.name if alone else None, by_layer and parameter.layer)
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def layer_buckets(chunk: Chunk) -> list[list]:
    """As :func:`buckets`, cut at layers too: what can come and go while a chunk computes."""
    return buckets(chunk, by_layer=True)
