"""Visits of a curve at a size: their order, the times of all ranks in them, and the rows that they become.

[Note: The last rank counts]
A host copy can be used only when all of its writers on a node have written. A collective between nodes shares their
links: ranks whose part comes first end early while the links still carry the parts of others, and the next transfer
waits for them. Timed by the median rank, transfers in a row would together be faster than the link (measured: gathers
by 5 to 9 %, two writers by 20 %). Within one node, a rank that ends early continues with its own processor, so every
rank counts alike.
"""

import random
from collections.abc import Sequence
from statistics import median

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.options import COPIES, Options
from megatron_ext.measure.sampling import p95
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.workload.route import ALGORITHM_NAMES, ROUTE_KINDS

QUARTERS = 4

ISSUED = {*COPIES, "nvme", "publish_nvme"}
"""Operations that return before they are complete. On a device the optimizer does so as well."""


def shuffled(visits: list, number: int) -> list:
    """The visits of pass ``number`` in its own order, the same on all ranks. The cost of a gather depends on the
    operation before it, so no size may always follow the same one."""
    return random.Random(number).sample(visits, len(visits))


def merge_visits(fabric: Fabric, own: dict, merged: dict) -> None:
    """Add a pass. ``merged[name, size]`` is a list over passes of (us that count in each round, us until issued on all
    ranks). See [Note: The last rank counts]."""
    everyone = gather_objects({key: (value.us, value.issued_us) for key, value in own.items()})
    sets = {name: sets_of_ranks(name, fabric.options) for name, _ in own}
    for key in own:
        rounds = until_last(sets[key[0]], [theirs[key][0] for theirs in everyone])
        ranks = [rank for together in sets[key[0]] for rank in together]
        issued = [value for rank in ranks for value in everyone[rank][key][1]]
        merged.setdefault(key, []).append((rounds, issued))


def first_medians(merged: dict) -> dict[tuple[str, int], float]:
    """The medians of the first pass, by name and size; the same on all ranks."""
    return {visit: median(us for us_of_ranks in passes[0][0] for us in us_of_ranks) for visit, passes in merged.items()}


def rows_of_curves(merged: dict, refined: set, on_device: bool = False) -> dict[str, list[dict]]:
    """By name, the rows of the table's curve: median, 95th percentile and further figures of each size."""
    curves: dict[str, list[dict]] = {}
    for (name, size), passes in sorted(merged.items()):
        rounds = [us_of_ranks for times, _ in passes for us_of_ranks in times]
        us = [value for us_of_ranks in rounds for value in us_of_ranks]
        point = {
            "size_bytes": size,
            "p50_us": median(us),
            "p95_us": p95(us),
            "samples": len(us),
            "medians_us": _medians_of_quarters(rounds),
            "passes": len(passes),
        }
        if (name, size) in refined:
            point["refined"] = True
        if name in ISSUED or (name == "optimizer" and on_device):
            point["issued_us"] = median(value for _, issued in passes for value in issued)
        curves.setdefault(name, []).append(point)
    return curves


def _medians_of_quarters(rounds: list[tuple[float, ...]]) -> list[float]:
    """Medians over all ranks of the rounds of each quarter, in the order of time."""
    parts = min(QUARTERS, len(rounds))
    cuts = [len(rounds) * part // parts for part in range(parts + 1)]
    return [median(us for us_of_ranks in rounds[start:end] for us in us_of_ranks) for start, end in zip(cuts, cuts[1:])]


WRITES = {"publish", "internode", "publish_nvme"}
COLLECTIVES = {"reduce", *ALGORITHM_NAMES, *(kind.name for kind in ROUTE_KINDS.values() if kind.gathers)}


def until_last(together: list[list[int]], us_of_ranks: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """By round, the times that count, in microseconds.

    Args:
        together: sets of ranks of which the last rank counts, see :func:`sets_of_ranks`.
        us_of_ranks: for every rank of the run, its time in every round.
    """
    return [tuple(max(us[rank] for rank in ranks) for ranks in together) for us in zip(*us_of_ranks, strict=True)]


def sets_of_ranks(name: str, options: Options) -> list[list[int]]:
    """The sets of ranks of which the last rank counts when ``name`` is timed. A rank that takes no part is in none,
    nor is one that exchanges pipeline messages within a node if others leave their node."""
    ranks = range(options.world_size)
    if name in WRITES:
        return writers(options)
    if name in COLLECTIVES and options.nodes > 1:
        stages = range(options.pipeline_model_parallel_size)
        return [list(members) for stage in stages for members in options.parallel.replicas(stage)]
    if name == "p2p":  # with an odd number of pipeline ranks, one has no partner
        pairs = [(rank, peer) for rank, peer in enumerate(options.peers) if peer is not None]
        crossing = [pair for pair in pairs if pair[0] // options.node_size != pair[1] // options.node_size]
        return [[rank] for rank, _ in crossing or pairs]  # a plan waits for the slowest messages
    return [[rank] for rank in ranks]


def writers(options: Options) -> list[list[int]]:
    """The ranks of each data-parallel group on each node, which together write its host copy or its files. Nodes
    may have different numbers of them (``nodes_of_replicas`` refuses that)."""
    found = {}
    for rank in range(options.world_size):
        found.setdefault((options.data_place(rank)[0], rank // options.node_size), []).append(rank)
    return list(found.values())
