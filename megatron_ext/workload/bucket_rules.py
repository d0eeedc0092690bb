"""Which parameters of a chunk share a bucket, by Megatron's own rule and cut at layers.

Source: Megatron-LM ``megatron/core/distributed/param_and_grad_buffer.py`` (one buffer per dtype, another for experts;
the shared embedding has a bucket of its own; buckets are filled from the last parameter on and closed when full) and
``distributed_data_parallel.py`` (the size of a bucket, also for experts; one bucket per chunk except in the first
stage).
"""

from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.workload import Chunk

LEAST_BUCKET, BUCKET_OF_A_RANK = 40_000_000, 1_000_000
"""In elements. Megatron fills a bucket up to the larger of the first, and the second times the data-parallel size."""


def stock_buckets(chunk: Chunk, data_parallel_size: int) -> list[list]:
    """Parameters of a chunk as Megatron buckets them without a schedule, in execution order."""
    if chunk.pp_rank or chunk.model_chunk_id:
        return buckets(chunk)
    found, elements = [], max(LEAST_BUCKET, BUCKET_OF_A_RANK * data_parallel_size)
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
    """Parameters that may share a bucket: those of one dtype. Experts and the shared embedding have their own."""
    found: dict[tuple, list] = {}
    for parameter in chunk.parameters:
        alone = parameter.shared_embedding or (by_layer and parameter.borrowed_by)
        key = (parameter.expert, parameter.dtype, parameter.name if alone else None, by_layer and parameter.layer)
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def layer_buckets(chunk: Chunk) -> list[list]:
    """As :func:`buckets`, but cut at layers: the units that can be unsharded and resharded while a chunk computes."""
    return buckets(chunk, by_layer=True)
