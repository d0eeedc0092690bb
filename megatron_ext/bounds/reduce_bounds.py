"""The least time that reduces cost a rank: from the last backward of a chunk on, next to the compute that is left; and
at every visit of a chunk if ``limits.device_bytes`` leaves no room for whole gradients to stay.

[Note: From the last backward on]
Symbols, for one rank and the last backward of one of its chunks:

* ``c``: compute from some layer of that backward to the end of the rank's steps.
* ``r_i``, ``c_i``: microseconds, alone, of the reductions that cannot start before the rank has only ``c_i`` of compute
  left.
* ``s``: the least factor by which compute slows a reduction (``s >= 1``).

1. Gradients of a layer are reduced after its last backward. So ``r_i`` starts when at most ``c_i`` of compute is left.
2. While ``c_i`` of compute runs, at most ``c_i / s`` of the reductions can be done. Slower compute hides no more than
   it costs, because ``s >= 1``.
3. So from there on at least ``c + max_i(r_i - c_i / s)`` microseconds pass.

[Note: Forced reduces]
Symbols, for a rank with one chunk: ``G`` is the bytes of its whole gradients, ``L`` is ``limits.device_bytes``, ``F``
is the bytes that any schedule keeps on the device (main parameters and optimizer states), ``V`` is the number of its
backward steps.

1. A group that is not reduced in a backward step keeps its whole gradient until the next backward step. When that step
   begins, such gradients have at most ``L - F`` bytes.
2. So in each of the first ``V - 1`` backward steps gradients of at least ``G - (L - F)`` bytes are reduced. In the last
   backward step all gradients are reduced.
3. The reduces of a rank run one after another, and the first begins after the start of the rank's first backward.
"""

import contextlib
from math import inf
from typing import NamedTuple

from megatron_ext.bounds.link_rates import best_rate_sizes, largest_group
from megatron_ext.bounds.memory_headroom import least_of_states
from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.activity_kinds import COMPUTE, REDUCE
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Workload


class LastBackward(NamedTuple):
    """The last backward of a chunk.

    Attributes:
        step: its index among the rank's steps.
        before_us: compute of the rank before it.
        from_start_us: the least time from its start until all gradients that were not complete then are reduced.
    """

    step: int
    before_us: float
    from_start_us: float


def last_backwards(workload: Workload, timing: Timing, rank: int) -> list[LastBackward]:
    """The last backward of each chunk of a rank, the latest first."""
    pp, steps = workload.parallel.pp, steps_of_ranks(workload.parallel)[rank]
    tail_us = least_tail_us(workload, timing, rank)
    total_us = sum(sum(t.forward) + sum(t.backward) for t in timing.layers[rank]) * workload.parallel.num_microbatches
    found, seen = [], set()
    compute_us = reduce_us = 0.0
    waiting = [(0.0, 0.0)]
    for index in range(len(steps) - 1, -1, -1):
        chunk, backward = steps[index].stage // pp, steps[index].kind == "B"
        times = timing.layers[rank][chunk]
        if not backward or chunk in seen:
            compute_us += sum(times.backward if backward else times.forward)
            continue
        seen.add(chunk)
        from_start, above = 0.0, sum(times.backward)
        for layer, us in enumerate(least_reduce_us(workload, workload.chunk(rank, chunk), timing)):
            reduce_us += us
            if us:  # not before this layer's own backward
                waiting.append((compute_us, reduce_us))
                from_start = max(from_start, above + _from_start_us(compute_us, waiting, timing, tail_us))
            above -= times.backward[layer]
            compute_us += times.backward[layer]
        from_start = max(from_start, _from_start_us(compute_us, waiting, timing, tail_us))
        found.append(LastBackward(index, total_us - compute_us, from_start))
    return found


def least_tail_us(workload: Workload, timing: Timing, rank: int) -> float:
    """The least time between a rank's last compute and the end of reducing its gradients.

    One group holds the parameters of the very last layer, if it has any, and is reduced after it.
    """
    pp = workload.parallel.pp
    chunk = workload.chunk(rank, steps_of_ranks(workload.parallel)[rank][-1].stage // pp)
    return timing.least_reduce_us if any(parameter.layer == 0 for parameter in chunk.parameters) else 0.0


def rest_us(done_us: float, step: int, last: list[LastBackward]) -> float:
    """The least time that still follows on a rank that has computed for ``done_us``, is in step ``step``, and has
    reduced nothing yet."""
    return max((one.before_us - done_us + one.from_start_us for one in last if one.step > step), default=0.0)


def least_reduce_us(workload: Workload, chunk: Chunk, timing: Timing) -> list[float]:
    """By layer, the microseconds alone in which any grouping of the chunk's parameters can be reduced at best; 0
    without a curve for reduces."""
    found = [0.0] * chunk.num_layers
    for parameter, us in least_cost_of_groups(workload, chunk, timing):
        found[parameter.layer] += us
    return found


def least_cost_of_groups(workload: Workload, chunk: Chunk, timing: Timing):
    """For each parameter, its bytes times the least time per byte for a reduce of any group that can hold it."""
    if timing.table.reduce is None or not chunk.bytes:
        return
    largest, least = largest_group(workload, (chunk,)), {}
    for expert in {parameter.expert for parameter in chunk.parameters}:
        own, per_byte = timing.among(workload.parallel.ranks_of(expert)), inf
        measured = {point.size_bytes for point in own.reduces}
        sizes = best_rate_sizes(measured, largest) | {parameter.bytes for parameter in chunk.parameters}
        for size in sorted(sizes, reverse=True):
            with contextlib.suppress(InputError):  # groups larger than measured cannot be planned
                per_byte = min(per_byte, own.reduce_us(size) / size)
            least[expert, size] = per_byte
    for parameter in chunk.parameters:
        if 0 < least[parameter.expert, parameter.bytes] < inf:
            yield parameter, parameter.bytes * least[parameter.expert, parameter.bytes]


def _from_start_us(compute_us: float, waiting: list[tuple[float, float]], timing: Timing, tail_us: float) -> float:
    """Inequality 3 of [Note: From the last backward on]; ``waiting`` are pairs ``(c_i, r_i)``."""
    slower = 1.0 + timing.slowdowns.least_excess(REDUCE, COMPUTE)
    after = max(reduce_us - left / slower for left, reduce_us in waiting)
    return compute_us + max(after, tail_us)


def forced_reduce_us(workload: Workload, timing: Timing, pp_rank: int) -> float:
    """The least microseconds from the start of a rank's first backward to the end of its last reduce; 0 if no reduce is
    forced, or if the rank has several chunks. See [Note: Forced reduces]."""
    limit, chunks = workload.limits.device_bytes, workload.chunks_of_rank(pp_rank)
    if limit is None or workload.zero_stage < 2 or len(chunks) > 1:
        return 0.0
    parameters = [p for chunk in chunks for p in chunk.parameters]
    item_bytes = workload.optimizer.gradient_item_bytes
    room = limit - least_of_states(workload, pp_rank)
    forced = sum(p.numel for p in parameters) * item_bytes - max(room, 0)
    least = [(p, us) for chunk in chunks for p, us in least_cost_of_groups(workload, chunk, timing)]
    if forced <= 0 or not least:
        return 0.0
    per_byte = min(us / (p.bytes // ITEM_BYTES[p.dtype] * item_bytes) for p, us in least)
    return (workload.parallel.num_microbatches - 1) * forced * per_byte + sum(us for _, us in least)
