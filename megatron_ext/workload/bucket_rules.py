"""Which parameters of a chunk share a bucket, by Megatron's own rule and cut at layers.

Source: Megatron-LM ``megatron/core/distributed/param_and_grad_buffer.py`` (one buffer a dtype; the shared
embedding has a bucket of its own) and ``distributed_data_parallel.py`` (one bucket a chunk where bucketing is off).
"""

from megatron_ext.workload.workload import Chunk


def buckets(chunk: Chunk) -> list[list]:
    """Parameters of a chunk as Megatron buckets them: by dtype, the shared embedding apart."""
    found: dict[tuple, list] = {}
    for parameter in chunk.parameters:
        key = (parameter.dtype, parameter.name if parameter.shared_embedding else None)
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def layer_buckets(chunk: Chunk) -> list[list]:
    """As :func:`buckets`, cut at layers too: what can come and go while a chunk computes."""
    found: dict[tuple, list] = {}
    for parameter in chunk.parameters:
        alone = parameter.shared_embedding or parameter.borrowed_by
        key = (parameter.layer, parameter.dtype, parameter.name if alone else None)
        found.setdefault(key, []).append(parameter)
    return list(found.values())
