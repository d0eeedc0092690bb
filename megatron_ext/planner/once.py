"""Zero stage 1: every group once an iteration, to be there when its chunk first computes.

Each rank's groups form one list in order of first use; a link that serves them in that
order has the least lateness (earliest deadline first, Jackson 1955). What is left to decide
is how the parameters are grouped and which group goes by which link: groups are given, in
order, to the link on which they arrive first, and a bounded local search by simulation
then moves single groups where that helps the whole pipeline.
"""

from typing import NamedTuple

from megatron_ext.planner.assemble import Placed, assemble, make_group
from megatron_ext.planner.fit import pinned_need
from megatron_ext.planner.visits import first_uses
from megatron_ext.schedule.model import Group, Schedule
from megatron_ext.simulator.simulate import run
from megatron_ext.simulator.stock import buckets, layer_buckets
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.model import Workload


class Decisions(NamedTuple):
    """``groups``; ``order[rank]``: group ids in order of first use; ``routed[group]``."""

    groups: tuple[Group, ...]
    order: tuple[tuple[int, ...], ...]
    routed: tuple[str, ...]


def grouped(workload: Workload, cut) -> tuple[tuple[Group, ...], tuple[tuple[int, ...], ...]]:
    """Groups by the rule ``cut`` and, by rank, their ids in order of first use."""
    groups: list[Group] = []
    layers: list[int] = []
    by_rank: list[list[int]] = [[] for _ in range(workload.parallel.pp)]
    for chunk in workload.chunks:
        for members in cut(chunk):
            by_rank[chunk.pp_rank].append(len(groups))
            groups.append(make_group(workload, chunk.pp_rank, chunk.model_chunk_id, members))
            layers.append(members[0].layer)
    order = []
    for pp_rank, ids in enumerate(by_rank):
        first = first_uses(workload, pp_rank)
        order.append(tuple(sorted(ids, key=lambda g: (first[groups[g].model_chunk_id], layers[g], g))))
    return tuple(groups), tuple(order)


def schedule_of(workload: Workload, decisions: Decisions, planner: str, options=None) -> Schedule:
    """Everything issued at the start, in order of first use."""
    placed = []
    for pp_rank, ids in enumerate(decisions.order):
        first = first_uses(workload, pp_rank)
        placed.append(
            [Placed(g, decisions.routed[g], -1, first[decisions.groups[g].model_chunk_id]) for g in ids]
        )
    return assemble(workload, decisions.groups, placed, planner=planner, options=options)


def spread(workload: Workload, timing: Timing, groups, order, routes) -> tuple[str, ...]:
    """Each group, in order, to the link on which it arrives first, within the pinned memory."""
    routed = ["gpu"] * len(groups)
    if "cpu" not in routes:
        return tuple(routed)
    fast = "gpu" in routes
    limit = workload.limits.pinned_host_bytes
    for pp_rank, ids in enumerate(order):
        gpu_free = cpu_free = published = 0.0
        for g in ids:
            size = groups[g].bytes
            by_gpu = gpu_free + timing.gather_us("gpu", size) if fast else float("inf")
            ready = published + timing.publish_us(pp_rank, ("cpu",), size)
            by_cpu = max(cpu_free, ready) + timing.gather_us("cpu", size)
            if by_cpu < by_gpu:
                routed[g] = "cpu"
                if limit is not None and max(pinned_need(workload, groups, routed)) > limit:
                    routed[g] = "gpu"
            if routed[g] == "cpu":
                cpu_free, published = by_cpu, ready
            else:
                gpu_free = by_gpu
    return tuple(routed)


def candidates(workload: Workload, timing: Timing, routes) -> list[Decisions]:
    """Starting points of the search."""
    found = []
    for cut in (buckets, layer_buckets):
        groups, order = grouped(workload, cut)
        found.append(Decisions(groups, order, spread(workload, timing, groups, order, routes)))
        if "gpu" in routes:
            found.append(Decisions(groups, order, ("gpu",) * len(groups)))
        everything = ("cpu",) * len(groups)
        limit = workload.limits.pinned_host_bytes
        if "cpu" in routes and (limit is None or max(pinned_need(workload, groups, everything)) <= limit):
            found.append(Decisions(groups, order, everything))
    return found


SEARCH_STEPS = 400_000
"""Simulated steps that the local search may spend; a count, not a clock, so that the same
inputs give the same plan."""


def improve(workload: Workload, timing: Timing, decisions: Decisions, routes) -> tuple[Decisions, float]:
    """Move single groups to the other link while the simulated step time falls."""
    best_us = run(workload, timing, schedule_of(workload, decisions, "hybrid"), bound_us=0.0).step_time_us
    if not {"gpu", "cpu"} <= set(routes):
        return decisions, best_us
    parallel = workload.parallel
    steps = 2 * parallel.pp * parallel.vp * parallel.num_microbatches + len(decisions.groups)
    budget = SEARCH_STEPS // steps
    limit = workload.limits.pinned_host_bytes
    improved = True
    while improved and budget > 0:
        improved = False
        for g in range(len(decisions.groups)):
            if budget <= 0:
                break
            routed = list(decisions.routed)
            routed[g] = "cpu" if routed[g] == "gpu" else "gpu"
            if limit is not None and max(pinned_need(workload, decisions.groups, routed)) > limit:
                continue
            budget -= 1
            other = decisions._replace(routed=tuple(routed))
            us = run(workload, timing, schedule_of(workload, other, "hybrid"), bound_us=0.0).step_time_us
            if us < best_us * (1 - 1e-9):
                decisions, best_us, improved = other, us, True
    return decisions, best_us


def plan_once(workload: Workload, timing: Timing, routes) -> Schedule:
    """The best schedule found for zero stage 1."""
    scored = []
    for decisions in candidates(workload, timing, routes):
        us = run(workload, timing, schedule_of(workload, decisions, "hybrid"), bound_us=0.0).step_time_us
        scored.append((us, len(scored), decisions))
    _, _, best = min(scored)
    best, _ = improve(workload, timing, best, routes)
    return schedule_of(workload, best, "hybrid")
