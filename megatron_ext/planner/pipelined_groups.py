"""Group sizes for gathering a chunk while it computes: few calls, but no long wait for the first group.

Source: PipeSwitch (Bai, Zhang, Zhu and Jin, OSDI 2020), which finds the grouping of layers that lets transfer and
compute overlap best. Here a dynamic program runs over prefixes of layers. For each prefix it keeps the groupings that
no other grouping beats both in the end of transfer and in the end of compute.
"""

from megatron_ext.bounds.least_loads import layer_bytes
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Chunk

MOST_KEPT = 16
"""Most groupings that are kept for one prefix. The front is short in practice."""


def pipelined_cut(timing: Timing, chunk: Chunk, route: str, limit: int | None = None) -> list[int]:
    """First layers of the groups with which the chunk's forward ends earliest, if all are gathered by ``route``.

    Args:
        limit: most bytes of a group of several layers; None means unlimited.
    """
    sizes, parallel = layer_bytes(chunk), timing.workload.parallel
    kinds = [(timing.among(parallel.ranks_of(expert)), layer_bytes(chunk, expert)) for expert in (False, True)]
    compute = timing.layers[chunk.pp_rank][chunk.model_chunk_id].forward
    # By number of layers: (end of compute, end of transfer, first layers of the groups).
    fronts: list[list[tuple[float, float, tuple[int, ...]]]] = [[(0.0, 0.0, ())]]
    for end in range(1, len(sizes) + 1):
        found = []
        for begin in range(end):
            size = sum(sizes[begin:end])
            if limit is not None and size > limit and end - begin > 1:
                continue
            parts = [(own, sum(of_kind[begin:end])) for own, of_kind in kinds]
            gather = sum(own.gather_us(route, part) for own, part in parts if part)
            work = sum(compute[begin:end])
            found += [
                (max(computed, moved + gather) + work, moved + gather, (*starts, begin))
                for computed, moved, starts in fronts[begin]
            ]
        found.sort()
        front, least = [], float("inf")
        for item in found:
            if item[1] < least:
                front.append(item)
                least = item[1]
        fronts.append(front[:MOST_KEPT])
    return list(min(fronts[-1])[2]) or [0]
