"""The fastest plan that keeps ``limits.device_bytes`` at zero stages 2 and 3: gradients, shards and routes together.

Every rule of :mod:`megatron_ext.planner.memory_settings` is estimated by placement passes; the best few are searched.
"""

from math import inf

import msgspec

from megatron_ext.bounds.memory_headroom import what_helps
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.memory_settings import Placer, Relief, Rule, refuse, rules
from megatron_ext.planner.search import Grid, Search, Settings, number_of_steps, search
from megatron_ext.planner.stock import groups_of
from megatron_ext.schedule.host_shards import can_rest_on_host
from megatron_ext.schedule.match import check_device_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

SEARCHED = 2
"""Rules that are searched, the best by estimate; more only where none of these gives a schedule."""

FEW_STEPS = 4096
"""With more steps an estimate takes long: fewer ways to cut are estimated."""


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
    reliefs: set[Relief] = {"sharded", "host"}
    hosted = workload.limits.pinned_host_bytes != 0 and can_rest_on_host(workload)
    if workload.zero_stage == 3 and hosted and not only_gathers:
        shard_routes: tuple[Route, ...] = ("cpu_shard",) if timing.offers_cpu_shard else ()
        if "cpu" in routes or shard_routes:
            reliefs.add("shards")
            routes = tuple(sorted({*routes, *shard_routes}, key=("gpu", "cpu", "cpu_shard", "nvme").index))
    estimated = _estimated(workload, timing, routes, frozenset(reliefs), bound_us)
    found: list[tuple[float, Schedule]] = []
    refused: InputError | None = None
    for _, rule in estimated:
        if len(found) == SEARCHED:
            break
        try:
            schedule, us = _searched(workload, timing, routes, rule, bound_us)
            found.append((us, schedule))
        except InputError as error:
            refused = refused or error
    if found:
        return min(found, key=lambda item: item[0])[1]
    groups, _ = groups_of(workload, layer_buckets)
    advice = what_helps(workload)
    raise refused if refused is not None else refuse(workload, groups, frozenset(reliefs), advice)


def _searched(workload, timing, routes, rule: Rule, bound_us: float) -> tuple[Schedule, float]:
    limited = _with_whole_bytes(workload, rule)
    schedule, us = search(limited, timing, routes, bound_us, Placer(workload, rule), effort=1 / SEARCHED)
    limit = workload.limits.device_bytes
    assert limit is not None
    check_device_bytes(validate(schedule), workload, limit)
    return schedule, us


def _with_whole_bytes(workload: Workload, rule: Rule) -> Workload:
    limits = msgspec.structs.replace(workload.limits, whole_parameter_bytes=rule.whole_bytes)
    return workload if rule.whole_bytes is None else msgspec.structs.replace(workload, limits=limits)


def _estimated(workload, timing, routes, reliefs: frozenset[Relief], bound_us: float) -> list[tuple[float, Rule]]:
    """Rules that fit, the fastest by estimate first. Of rules that place a layer's groups alike, one."""
    layers, _ = groups_of(workload, layer_buckets)
    seen, found = set(), []
    for rule in rules(workload, reliefs):
        placer = Placer(workload, rule)
        placed = placer(layers)
        key = rule.whole_bytes, placed
        if placed is None or key in seen:
            continue
        seen.add(key)
        grid = Grid(Search(_with_whole_bytes(workload, rule), timing, routes, bound_us, placer))
        cuts = range(len(grid.cuts))
        if number_of_steps(workload) > FEW_STEPS:
            cuts = cuts[-2:]
        middle = min(6, grid.sizes[2] - 1)
        us = min((grid.estimate(Settings(cut, 0, middle, 0)) for cut in cuts), default=inf)
        if us < inf:
            found.append((us, len(found), rule))
    return [(us, rule) for us, _, rule in sorted(found, key=lambda item: item[:2])]
