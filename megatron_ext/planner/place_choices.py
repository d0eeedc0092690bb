"""What placement passes may choose from: groups with host copies or staging slots, sets of routes, horizons."""

from math import inf

from megatron_ext.bounds.feasibility import pinned_need
from megatron_ext.bounds.host_room import pinned_limit
from megatron_ext.planner.blocks import Blocks
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload


def hosted_groups(workload: Workload, blocks: Blocks, order: int = 0) -> frozenset[int]:
    """Groups that may have a host copy: all, or as many as fit the pinned memory.

    ``order`` says who comes first: 0 the first groups of every rank, 1 the first ranks, 2 the
    last ranks, 3 the largest groups; 4 is 0 with all optimizer states in memory.
    """
    groups = blocks.groups
    limit = pinned_limit(workload, groups, states_in_memory=order == 4)
    routed = ["cpu"] * len(groups)
    if limit is None or max(pinned_need(workload, groups, routed), default=0) <= limit:
        return frozenset(range(len(groups)))
    place, seen = {}, {}
    for g, group in enumerate(groups):
        stage = (group.model_chunk_id, group.pp_rank)
        place[g] = seen[stage] = seen.get(stage, -1) + 1
    keys = (
        lambda g: (groups[g].model_chunk_id, place[g], groups[g].pp_rank, g),
        lambda g: (groups[g].pp_rank, groups[g].model_chunk_id, place[g], g),
        lambda g: (-groups[g].pp_rank, groups[g].model_chunk_id, place[g], g),
        lambda g: (-groups[g].bytes, groups[g].model_chunk_id, place[g], groups[g].pp_rank, g),
    )
    routed = ["gpu"] * len(groups)
    chosen = set()
    # Staging slots are pinned too: reserve bytes for them where they may be used.
    reserve = workload.limits.nvme_slots * (workload.limits.nvme_slot_bytes or 0) * workload.parallel.node_size
    for group in sorted(range(len(groups)), key=keys[order % 4]):
        routed[group] = "cpu"
        if max(pinned_need(workload, groups, routed)) + reserve > limit:
            routed[group] = "gpu"
        else:
            chosen.add(group)
    return frozenset(chosen)


def staged_groups(workload: Workload, blocks: Blocks, hosted: frozenset[int]) -> frozenset[int]:
    """Groups that may go by ``nvme``: those without a host copy that fit a slot, if slots fit at all."""
    limits = workload.limits
    if not limits.nvme_slots:
        return frozenset()
    size = limits.nvme_slot_bytes
    usable = [g for g, group in enumerate(blocks.groups) if g not in hosted and (size is None or group.bytes <= size)]
    routed = ["cpu" if g in hosted else "gpu" for g in range(len(blocks.groups))]
    for group in usable:
        routed[group] = "nvme"
    limit = pinned_limit(workload, blocks.groups)
    if limit is not None and max(pinned_need(workload, blocks.groups, routed)) > limit:
        return frozenset()
    return frozenset(usable)


def route_sets(routes: tuple[Route, ...]) -> list[tuple[Route, ...]]:
    """Sets of routes worth trying, the richest first. A set without ``gpu`` cannot fall back on
    an all-gather, so it must be ``cpu`` alone."""
    sets: list[tuple[Route, ...]] = [routes]
    if "gpu" in routes and len(routes) > 1:
        sets.append(("gpu",))
        others: list[Route] = [route for route in routes if route != "gpu"]
        if len(others) > 1:
            sets.extend(("gpu", route) for route in others)
        if "cpu_shard" in others and "nvme" in others:
            sets.append(tuple(route for route in routes if route != "nvme"))
    if "cpu" in routes and routes != ("cpu",):
        sets.append(("cpu",))
    return sets


def horizons(workload: Workload, timing: Timing) -> list[float]:
    """Times to look ahead, by factors of about 1.4 from one layer's compute to everything."""
    if workload.zero_stage < 3 and not workload.limits.nvme_slots:
        return [inf]
    layers = [us for row in timing.layers for times in row for us in times.forward]
    found = [sum(layers) / len(layers)]
    total = sum(layers) * 3 * workload.parallel.num_microbatches / workload.parallel.pp
    while found[-1] < total:  # ends: total is finite and found[0] is positive, or both are 0
        found.append(found[-1] * 2**0.5)
    return [0.0, *found, inf]
