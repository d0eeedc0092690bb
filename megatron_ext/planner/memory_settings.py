"""Rules by which groups may be relieved so that ``limits.device_bytes`` holds.

A rule leaves some bytes for whole parameters and gives an order of reliefs (:mod:`megatron_ext.planner.relief`).
"""

from collections.abc import Iterator

from megatron_ext.bounds.feasibility import largest_layers
from megatron_ext.planner.relief import Relief, Rule
from megatron_ext.workload.workload import Workload, group_bytes

ORDERS: tuple[tuple[Relief, ...], ...] = (
    ("sharded", "host", "shards", "alone"),
    ("sharded", "alone", "host", "shards"),
    ("shards", "sharded", "alone", "host"),
    ("sharded", "shards", "alone", "host"),
    ("host", "alone", "shards"),
)


def rules(workload: Workload, reliefs: frozenset[Relief]) -> Iterator[Rule]:
    """Rules worth trying, those that leave most for whole parameters first."""
    orders: dict[tuple[Relief, ...], None] = dict.fromkeys(
        tuple(name for name in order if name in reliefs) for order in ORDERS
    )
    parallel = workload.parallel
    visits = {1} | ({parallel.microbatch_group_size} if parallel.order == "interleaved" else set())
    for whole_bytes in _whole_bytes(workload):
        for every in sorted(visit for visit in visits if visit <= parallel.num_microbatches):
            for order in orders:
                yield Rule(whole_bytes, order, every)


def _whole_bytes(workload: Workload) -> list[int | None]:
    if workload.zero_stage < 3:
        return [None]
    parallel = workload.parallel
    everything = max(
        sum(group_bytes([p], parallel) for chunk in workload.chunks_of_rank(rank) for p in chunk.parameters)
        for rank in range(parallel.pp)
    )
    least = max(largest_layers(workload))
    most = min(everything, workload.limits.whole_parameter_bytes or everything)
    sizes: set[int] = {most, most // 2, most // 4, 3 * least, 2 * least, least}
    return [*sorted((size for size in sizes if least <= size <= most), reverse=True)]
