"""Rules by which groups may be relieved so that ``limits.device_bytes`` holds, and the refusal where none does.

A rule leaves some bytes for whole parameters and gives an order of reliefs (:mod:`megatron_ext.planner.relief`).
"""

from collections.abc import Iterator, Sequence

from megatron_ext.bounds.feasibility import largest_layers
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.relief import Kept, Placer, Relief, Rule, relieved
from megatron_ext.schedule.user_defined_schedule import Group
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
        sum(group_bytes([p], parallel.dp) for chunk in workload.chunks_of_rank(rank) for p in chunk.parameters)
        for rank in range(parallel.pp)
    )
    least = max(largest_layers(workload))
    most = min(everything, workload.limits.whole_parameter_bytes or everything)
    sizes: set[int] = {most, most // 2, most // 4, 3 * least, 2 * least, least}
    return [*sorted((size for size in sizes if least <= size <= most), reverse=True)]


def least_held(workload: Workload, groups: Sequence[Group], reliefs: frozenset[Relief]) -> list[dict[str, int]]:
    """By pipeline rank, what it holds at least, with everything relieved that can be."""
    whole = min((size for size in _whole_bytes(workload) if size is not None), default=None)
    placer = Placer(workload, Rule(whole, tuple(name for name in ORDERS[0] if name in reliefs)))
    found = []
    for rank, _, weighed in placer.by_rank(groups):
        ways = [[Kept() for _ in weighed]]
        for relief in placer.rule.reliefs:
            ways.append([relieved(one, way, relief) for one, way in zip(weighed, ways[-1])])
        found.append(min((placer.held(rank, weighed, way) for way in ways), key=lambda held: sum(held.values())))
    return found


def refuse(workload: Workload, groups: Sequence[Group], reliefs: frozenset[Relief], advice: str) -> InputError:
    """The error for a workload that no rule makes fit: what a rank holds at least, by kind, and what is missing."""
    limit = workload.limits.device_bytes
    assert limit is not None
    held = least_held(workload, groups, reliefs)
    rank = max(range(len(held)), key=lambda index: sum(held[index].values()))
    need = sum(held[rank].values())
    kinds = ", ".join(f"{kind.replace('_', ' ')} {size}" for kind, size in held[rank].items() if size)
    short = f"{need - limit} bytes short" if need > limit else "which no grouping that can be gathered keeps"
    return InputError(
        f"cannot fit: pipeline rank {rank} holds at least {need} bytes ({kinds}), {short}{advice}",
        field="limits.device_bytes",
        value=limit,
    )
