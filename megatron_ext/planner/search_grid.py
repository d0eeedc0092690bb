"""The settings that the hybrid policy searches: ways to cut and divide blocks, horizons, routes, host copies."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from megatron_ext.bounds.feasibility import pinned_need
from megatron_ext.bounds.host_room import pinned_limit
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.blocks import Blocks, cut_by_layer, cut_evenly, cut_within, make_blocks
from megatron_ext.planner.link_split import splitter
from megatron_ext.planner.pipelined_groups import pipelined_cut
from megatron_ext.planner.placement import Choices, place_gathers
from megatron_ext.planner.search_state import Search, number_of_steps, shortened
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Parameter, Workload


def fits(workload: Workload, blocks: Blocks) -> bool:
    """Whether every block fits on its device."""
    limit = workload.limits.whole_parameter_bytes
    if limit is None:
        return True
    if workload.zero_stage == 3:
        return all(block.bytes <= limit for block in blocks.blocks)
    totals = [0] * workload.parallel.pp
    for group in blocks.groups:
        totals[group.pp_rank] += group.bytes
    return max(totals) <= limit


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


PARTS_OF_LIMIT = (1, 2, 3, 4)
"""Where device memory is limited, blocks as large as these parts of the limit are tried, too."""


def cuttings(workload: Workload, timing: Timing, routes: tuple[Route, ...]) -> Iterator[list[list[int]]]:
    """Ways to cut all chunks into blocks, without repetitions.

    Whole; in 2, 4, ... parts of about equal bytes; by layer; the fewest blocks that the limit of device memory, or a
    part of it, holds; and the first chunk finer than the others (by layer, and by dynamic programming), which
    starts the first compute early at few calls. By layer every workload fits that fits at all.
    """
    deepest = max(chunk.num_layers for chunk in workload.chunks)
    limit = workload.limits.whole_parameter_bytes if workload.zero_stage == 3 else None
    chunks, seen = workload.chunks, []
    found = [[cut_evenly(chunk, 2**n) for chunk in chunks] for n in range((deepest - 1).bit_length())]
    found.append([cut_by_layer(chunk) for chunk in chunks])
    if limit is not None and deepest > 1:
        found += [[cut_within(workload, chunk, limit / part) for chunk in chunks] for part in PARTS_OF_LIMIT]
    if deepest > 1:
        found.append([cut_by_layer(chunk) if chunk.model_chunk_id == 0 else [0] for chunk in chunks])
        found.append(_pipelined(workload, timing, routes) or [])
    for cut in found:
        if cut and cut not in seen:
            seen.append(cut)
            yield cut


def _pipelined(workload: Workload, timing: Timing, routes: tuple[Route, ...]) -> list[list[int]] | None:
    """Groups that let the first chunk's gather and forward overlap best; None where not measured, or nothing to
    gather."""
    if not routes:
        return None
    route = "gpu" if "gpu" in routes else routes[0]
    limit = workload.limits.whole_parameter_bytes if workload.zero_stage == 3 else None
    try:
        return [
            pipelined_cut(timing, chunk, route, limit)
            if chunk.model_chunk_id == 0
            else [0]
            if limit is None
            else cut_within(workload, chunk, limit)
            for chunk in workload.chunks
        ]
    except InputError:
        return None


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


class Settings(NamedTuple):
    """One point of the grid that is searched: indices into the ways to cut, to divide blocks
    between links, horizons, sets of routes, and orders of giving host copies."""

    cut: int
    divide: int
    horizon: int
    routes: int
    hosts: int = 0


Divide = Callable[[list[Parameter]], list[list[Parameter]]]
"""Puts the parameters of a block into groups."""


class Grid:
    """All settings of a workload; each is estimated once."""

    def __init__(self, state: Search):
        workload, timing, routes = state.workload, state.timing, state.routes
        self.state, self.rough = state, shortened(workload)
        self.cuts = list(cuttings(workload, timing, routes))
        self.cuts += [cut for cut in state.cuts if cut not in self.cuts]
        self.divides: list[Divide | None] = [None]
        if len({*routes} - {"cpu_shard"}) > 1:
            self.divides.append(splitter(timing, tuple(route for route in routes if route != "cpu_shard")))
        limits = workload.limits
        if (
            workload.zero_stage == 3 and limits.whole_parameter_bytes is not None
        ) or limits.pinned_host_bytes is not None:
            self.divides.append(by_parameter)
        self.horizons = horizons(workload, timing)
        self.sets = route_sets(routes)
        orders = 5 if limits.host_bytes is not None and workload.optimizer.on_host else 4
        limited = limits.pinned_host_bytes is not None or limits.host_bytes is not None
        hosts = range(orders if limited and "cpu" in routes else 1)
        self.sizes = tuple(map(len, (self.cuts, self.divides, self.horizons, self.sets, hosts)))
        self._blocks: dict[tuple[int, int], Blocks | None] = {}
        self.estimates: dict[Settings, float] = {}
        self.refused: InputError | None = None

    def also_halved(self) -> None:
        """Let every division be tried with each of its groups cut in two of about equal bytes, too."""
        self.divides += [partial(halves, divide) for divide in self.divides]
        self.sizes = (self.sizes[0], len(self.divides), *self.sizes[2:])

    def made(self, settings: Settings) -> tuple[Blocks, Choices] | None:
        """Blocks and choices of these settings; None where they cannot work."""
        workload = self.state.workload
        key = (settings.cut, settings.divide)
        if key not in self._blocks:
            self._blocks[key] = self._placed(
                make_blocks(
                    workload, self.cuts[settings.cut], self.divides[settings.divide], self.state.timing.algorithm
                )
            )
        blocks, allowed = self._blocks[key], self.sets[settings.routes]
        if blocks is None:
            return None
        hosted = hosted_groups(workload, blocks, settings.hosts) if "cpu" in allowed else frozenset()
        staged = staged_groups(workload, blocks, hosted) if "nvme" in allowed else frozenset()
        from_host = frozenset(g for g, group in enumerate(blocks.groups) if group.shard_rests == "host")
        gathered = {g for g in range(len(blocks.groups)) if ("cpu_shard" if g in from_host else "gpu") in allowed}
        if not fits(workload, blocks) or len(gathered | hosted) < len(blocks.groups):
            return None
        return blocks, Choices(self.horizons[settings.horizon], allowed, hosted, staged, from_host=from_host)

    def _placed(self, blocks: Blocks) -> Blocks | None:
        """``blocks`` with their groups as the search's ``place`` says."""
        groups = blocks.groups if self.state.place is None else self.state.place(blocks.groups)
        return None if groups is None else blocks._replace(groups=groups)

    def estimate(self, settings: Settings) -> float:
        """Estimated end of the last step, by a placement pass of the :func:`shortened` workload."""
        workload = self.rough
        if settings not in self.estimates:
            made = self.made(settings)
            if made is None:
                self.estimates[settings] = inf
            else:
                self.state.effort -= (
                    number_of_steps(workload) + 2 * sum(map(len, made[0].of_stage)) * workload.parallel.num_microbatches
                )
                try:
                    self.estimates[settings] = place_gathers(workload, self.state.timing, *made).end_us
                except InputError as error:  # a group of a size that was not measured
                    self.estimates[settings] = inf
                    self.refused = self.refused or error
        return self.estimates[settings]

    def descend(self) -> None:
        """From every way to cut with every division, best first: better settings one axis at a
        time, until nothing changes or the effort is spent."""
        middle = min(6, self.sizes[2] - 1)  # looks about eight layers ahead
        starts = [Settings(c, d, middle, 0) for c in range(self.sizes[0]) for d in range(self.sizes[1])]
        for start in starts:
            self.estimate(start)
        for start in sorted(starts, key=lambda s: (self.estimates[s], s)):
            best, changed = start, True
            while changed:  # ends: each change has a lower estimate, and there are finitely many settings
                changed = False
                for axis in (2, 3, 4, 0, 1):
                    for value in self._values(axis, best):
                        if self.state.effort <= 0:
                            return
                        other = best._replace(**{Settings._fields[axis]: value})
                        if self.estimate(other) < self.estimates[best] * (1 - 1e-9):
                            best, changed = other, True

    def _values(self, axis: int, settings: Settings) -> Sequence[int]:
        """What to try along one axis: all, but of the many horizons only nearby ones and the last."""
        size = self.sizes[axis]
        if axis != 2:
            return range(size)
        near = [settings.horizon + d for d in (1, -1, 2, -2, 4, -4)]
        return [value for value in (*near, size - 1) if 0 <= value < size]


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


def by_parameter(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Every parameter that is not small beside the others a group of its own, so that a part of a
    layer can stay on the device, or have a host copy; the small ones together."""
    threshold = sum(p.bytes for p in parameters) / 16
    large = [[p] for p in parameters if p.bytes >= threshold]
    small = [p for p in parameters if p.bytes < threshold]
    return large + ([small] if small else [])


def halves(divide: Divide | None, parameters: list[Parameter]) -> list[list[Parameter]]:
    """The groups of ``divide``, or one of all, each cut in two of about equal bytes."""
    found = []
    for part in [parameters] if divide is None else divide(parameters):
        whole = sum(p.bytes for p in part)
        ends = range(1, len(part))
        middle = min(ends, key=lambda end: abs(2 * sum(p.bytes for p in part[:end]) - whole), default=0)
        found += [half for half in (part[:middle], part[middle:]) if half]
    return found
