"""The fastest plan that keeps ``limits.device_bytes`` at zero stages 2 and 3: gradients, shards and routes together.

Every rule of :mod:`megatron_ext.planner.memory_settings` is estimated by placement passes; the best few are searched.
"""

from math import inf

import msgspec

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.memory_settings import rules
from megatron_ext.planner.relief import Placer, Relief, Rule
from megatron_ext.planner.search import search
from megatron_ext.planner.search_grid import Grid, Settings
from megatron_ext.planner.search_state import POLISHED_STEPS, RELIEF_WEIGHT, Search, number_of_steps, relieved_share
from megatron_ext.planner.stock import groups_of
from megatron_ext.schedule.group_uses import uses_of_groups
from megatron_ext.schedule.host_shards import can_rest_on_host
from megatron_ext.schedule.match import check_device_bytes, match
from megatron_ext.schedule.state_placement import with_states_on_drive
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

SEARCHED = 2
"""Rules that are searched, the best by estimate; more only where none of these gives a schedule."""

FEW_STEPS = 4096
"""With more steps an estimate takes long, and a search longer: fewer ways to cut are estimated, and a rule that is
:data:`MUCH_SLOWER` than the best by estimate is not searched."""

MUCH_SLOWER = 0.02


def plan_within_memory(
    workload: Workload, timing: Timing, routes: tuple[Route, ...], bound_us: float, *, only_gathers: bool = False
) -> Schedule:
    """The fastest schedule found within ``limits.device_bytes``.

    Args:
        routes: that may be used; ``cpu_shard`` is added where shards may rest in host memory.
        only_gathers: by all-gathers alone, of shards that stay on the device.

    Raises:
        InputError: nothing fits, with what is missing and the settings that would help.
    """
    reliefs: set[Relief] = {"sharded", "host", "alone"}
    hosted = workload.limits.pinned_host_bytes != 0 and can_rest_on_host(workload)
    if workload.zero_stage == 3 and hosted and not only_gathers:
        shard_routes: tuple[Route, ...] = ("cpu_shard",) if timing.offers_cpu_shard else ()
        if "cpu" in routes or shard_routes:
            reliefs.add("shards")
            routes = tuple(sorted({*routes, *shard_routes}, key=("gpu", "cpu", "cpu_shard", "nvme").index))
    estimated = _estimated(workload, timing, routes, frozenset(reliefs), bound_us)
    found: list[tuple[float, Schedule]] = []
    many = number_of_steps(workload) > FEW_STEPS
    for us, rule in estimated:
        if len(found) == SEARCHED or (found and many and us > estimated[0][0] * (1 + MUCH_SLOWER)):
            break
        try:
            found.append(_searched(workload, timing, routes, rule, bound_us))
        except InputError:
            continue
    if found:
        return min(found, key=lambda item: item[0])[1]
    from megatron_ext.planner.least_memory import least_plan  # ortools takes a while to import

    return least_plan(workload, timing, routes, frozenset(reliefs))


def _searched(workload, timing, routes, rule: Rule, bound_us: float) -> tuple[float, Schedule]:
    limited = _with_whole_bytes(workload, rule)
    placer = Placer(workload, rule, timing)
    schedule, us = search(limited, timing, routes, bound_us, placer, 1 / SEARCHED, _own_cut(workload, placer))
    limit = workload.limits.device_bytes
    assert limit is not None
    check_device_bytes(validate(schedule), workload, limit)
    match(with_states_on_drive(schedule, workload), workload)  # host copies beside shards may not fit either
    return us * (1 + RELIEF_WEIGHT * relieved_share(schedule.groups)), schedule


def _own_cut(workload: Workload, placer: Placer) -> list[list[list[int]]]:
    """Layers that are relieved each a block of its own, so that no more than is missing need be; those between
    together."""
    layers, _ = groups_of(workload, layer_buckets)
    placed = placer(layers)
    if placed is None:
        return []
    relieved: dict[tuple[int, int], set[int]] = {}
    for group, (first, _) in zip(placed, uses_of_groups(placed, workload)):
        if group.gradients is not None or group.shard_rests is not None:
            relieved.setdefault((group.pp_rank, group.model_chunk_id), set()).add(first)
    cuts = []
    for chunk in workload.chunks:
        alone = relieved.get((chunk.pp_rank, chunk.model_chunk_id), set())
        cuts.append([n for n in range(chunk.num_layers) if not n or n in alone or n - 1 in alone])
    return [cuts]


def _with_whole_bytes(workload: Workload, rule: Rule) -> Workload:
    limits = msgspec.structs.replace(workload.limits, whole_parameter_bytes=rule.whole_bytes)
    return workload if rule.whole_bytes is None else msgspec.structs.replace(workload, limits=limits)


def _estimated(workload, timing, routes, reliefs: frozenset[Relief], bound_us: float) -> list[tuple[float, Rule]]:
    """Rules that fit, the fastest by estimate first. Of rules that place a layer's groups alike, one: that which gives
    whole parameters all that is left, or where that does not work the rule as it was."""
    layers, _ = groups_of(workload, layer_buckets)
    seen, found = {}, []

    def works(rule: Rule) -> bool:
        placer = Placer(workload, rule, timing)
        placed = placer(layers)
        if placed is None:
            return False
        key = rule.whole_bytes, placed
        if key in seen:
            return seen[key]
        filled = placer.filled(placed)
        seen[key] = filled != rule and works(filled)
        if not seen[key]:
            cut = _own_cut(workload, placer)
            us = _estimate(Grid(Search(_with_whole_bytes(workload, rule), timing, routes, bound_us, placer, cut)))
            seen[key] = us < inf
            if us < inf:
                found.append((us, len(found), rule))
        return seen[key]

    for rule in rules(workload, reliefs):
        works(rule)
    return [(us, rule) for us, _, rule in sorted(found, key=lambda item: item[:2])]


def _estimate(grid: Grid) -> float:
    """The best estimate of a few ways to cut; where a simulation is quick, the better of that and the rule's own cut as
    simulated."""
    steps = number_of_steps(grid.state.workload)
    cuts = range(len(grid.cuts))[-3 if steps > FEW_STEPS else 0 :]
    middle = min(6, grid.sizes[2] - 1)
    settings = [Settings(cut, 0, middle, 0) for cut in cuts]
    best = min(settings, key=grid.estimate)
    if steps > POLISHED_STEPS:
        return grid.estimate(best)
    own = [one for one in settings if grid.cuts[one.cut] in grid.state.cuts]
    made = [grid.made(one) for one in {best, *own} if grid.estimate(one) < inf]
    for one in made:
        if one is not None:
            grid.state.time_of(*one)
    return grid.state.best_mark
