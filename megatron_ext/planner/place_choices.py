"""What placement passes may choose from: groups with host copies or staging slots, sets of routes, horizons."""

from math import inf

from megatron_ext.bounds.host_room import pinned_limit
from megatron_ext.planner.blocks import Blocks
from megatron_ext.planner.passes.place_gathers import Choices
from megatron_ext.schedule.footprint import pinned_need
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route, kind_of
from megatron_ext.workload.workload import Workload


def choices_of(
    workload: Workload, blocks: Blocks, horizon_us: float, routes: tuple[Route, ...], order: int = 0
) -> Choices:
    """Choices of a placement pass: host copies and staging slots for as many groups as the limits allow, if ``routes``
    read them."""
    kinds = [kind_of(route) for route in routes]
    copied, slots = any(kind.reads_host_copy for kind in kinds), any(kind.staged for kind in kinds)
    hosted = hosted_groups(workload, blocks, order) if copied else frozenset()
    staged = staged_groups(workload, blocks, hosted) if slots else frozenset()
    from_host = frozenset(g for g, group in enumerate(blocks.groups) if group.shard_rests == "host")
    return Choices(horizon_us, routes, hosted, staged, from_host=from_host)


def hosted_groups(workload: Workload, blocks: Blocks, order: int = 0) -> frozenset[int]:
    """Groups that may have a host copy: all, or as many as fit the pinned memory.

    ``order`` says which groups come first: 0 the first groups of every rank, 1 the first ranks, 2 the last ranks, 3 the
    largest groups. 4 is the same as 0, but with all optimizer states in memory.
    """
    groups, every = blocks.groups, range(len(blocks.groups))
    limit = pinned_limit(workload, groups, states_in_memory=order == 4)
    if limit is None or max(pinned_need(workload, groups, every), default=0) <= limit:
        return frozenset(every)
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
    chosen: set[int] = set()
    # Staging slots are pinned as well: reserve bytes for them if they may be used.
    slot_bytes = workload.limits.nvme_slot_bytes if workload.limits.nvme_slots else None
    staged = {g for g, group in enumerate(groups) if slot_bytes is not None and group.bytes <= slot_bytes}
    for group in sorted(every, key=keys[order % 4]):
        chosen.add(group)
        if max(pinned_need(workload, groups, chosen, staged)) > limit:
            chosen.remove(group)
    return frozenset(chosen)


def staged_groups(workload: Workload, blocks: Blocks, hosted: frozenset[int]) -> frozenset[int]:
    """Groups that may go through staging slots: groups without a host copy that fit a slot, if slots fit at all."""
    limits, groups = workload.limits, blocks.groups
    if not limits.nvme_slots:
        return frozenset()
    size, limit = limits.nvme_slot_bytes, pinned_limit(workload, groups)
    usable = frozenset(g for g, group in enumerate(groups) if g not in hosted and (size is None or group.bytes <= size))
    short = limit is not None and max(pinned_need(workload, groups, hosted, usable)) > limit
    return frozenset() if short else usable


def route_sets(routes: tuple[Route, ...]) -> list[tuple[Route, ...]]:
    """Sets of routes worth trying, the richest first. A set without gathers of device shards has no all-gather to fall
    back to, so it must consist of host copies alone."""
    kinds = [kind_of(route) for route in routes]
    gathers = tuple(kind.name for kind in kinds if kind.needs_device_shard)
    copies = tuple(kind.name for kind in kinds if kind.reads_host_copy)
    others = [kind for kind in kinds if not kind.needs_device_shard]
    sets: list[tuple[Route, ...]] = [routes]
    if gathers and others:
        sets += [gathers, *((*gathers, kind.name) for kind in others if len(others) > 1)]
        if {(False, True), (True, False)} <= {(kind.shard_from_host, kind.staged) for kind in others}:
            sets.append(tuple(kind.name for kind in kinds if not kind.staged))
    if copies and copies != routes:
        sets.append(copies)
    return sets


def horizons(workload: Workload, timing: Timing) -> list[float]:
    """Times in microseconds to look ahead: 0, then one layer's compute and longer times by factors of about 1.4 up to
    the whole iteration, then infinity."""
    if workload.zero_stage < 3 and not workload.limits.nvme_slots:
        return [inf]
    layers = [us for row in timing.layers for times in row for us in times.forward]
    found = [sum(layers) / len(layers)]
    total = sum(layers) * 3 * workload.parallel.num_microbatches / workload.parallel.pp
    while found[-1] < total:  # ends: total is finite and found[0] is positive, or both are 0
        found.append(found[-1] * 2**0.5)
    return [0.0, *found, inf]
