"""How the parameters of a group lie in its bucket: Megatron's padding rules.

Source: Megatron-LM ``megatron/core/distributed/param_and_grad_buffer.py``,
``_ParamAndGradBuffer.__init__``: with the distributed optimizer every parameter starts
at a multiple of 64 elements and a bucket ends at a multiple of lcm(DP, 128) elements.
Parameters are laid out in reverse order.
"""

import math
from collections.abc import Sequence

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128

ITEM_BYTES = dict(float64=8, float32=4, float16=2, bfloat16=2, int64=8, int32=4, int16=2)
ITEM_BYTES |= dict.fromkeys(("int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def bucket_numel(numels: Sequence[int], data_parallel_size: int) -> int:
    """Elements of a bucket that holds parameters of ``numels`` elements, given in execution order."""
    end = 0
    for numel in reversed(numels):
        end = _round_up(end, PARAMETER_ALIGNMENT) + numel
    return _round_up(end, math.lcm(data_parallel_size, BUCKET_ALIGNMENT))


def shard_parts(numels: Sequence[int], data_parallel_size: int) -> list[list[int]]:
    """For each data-parallel rank, the elements, without padding, of each parameter of which its shard of the bucket
    that holds ``numels`` has a part."""
    size = bucket_numel(numels, data_parallel_size) // data_parallel_size
    held: list[list[int]] = [[] for _ in range(data_parallel_size)]
    end = 0
    for numel in reversed(numels):
        begin = _round_up(end, PARAMETER_ALIGNMENT)
        end = begin + numel
        for rank in range(begin // size, -(-end // size)):
            held[rank].append(min(end, (rank + 1) * size) - max(begin, rank * size))
    return held
