"""Reduces that ``limits.device_bytes`` forces at every visit of a chunk, where whole gradients have no room to stay.

[Note: Why this is a bound]
Symbols, for a rank with one chunk: ``G`` is the bytes of its whole gradients, ``L`` is ``limits.device_bytes``, ``F``
is what is on the device by any schedule (main parameters and optimizer states), ``V`` is its backward steps.

1. A group that is not reduced in a backward step keeps its whole gradient until the next one. When that begins, such
   gradients are at most ``L - F``.
2. So in each of the first ``V - 1`` backward steps gradients of at least ``G - (L - F)`` bytes are reduced, and in the
   last one all of them.
3. The reduces of a rank run one after another, and the first begins after the rank's first backward does.
"""

from megatron_ext.bounds.memory_headroom import least_of_states
from megatron_ext.bounds.reduce_tail import least_cost_of_groups
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.workload import Workload


def forced_reduce_us(workload: Workload, timing: Timing, pp_rank: int) -> float:
    """Least microseconds from the begin of a rank's first backward to the end of its last reduce; 0 where nothing is
    forced, or a rank has several chunks."""
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
    visits = workload.parallel.num_microbatches
    return (visits - 1) * forced * per_byte + sum(us for _, us in least)
