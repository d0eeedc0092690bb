"""A drawn schedule in which everything rests where a case says."""

import itertools
import random
import zlib

from case_table import Training
from draw_schedule import draw_schedule, states_on_device, states_on_drive, with_own_peak, with_step_slots
from msgspec.structs import replace

from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.schedule import match, validate
from megatron_ext.schedule.group_facts import can_step_early, saved_bytes
from megatron_ext.schedule.memory_bill import copies_of_whole
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

FEWEST_GROUPS = 3
"""So that some of their states can rest elsewhere than others'."""

MOST_SEEDS = 300
"""Schedules that are drawn until one fits the case; a few are enough."""


def placed_schedule(case: Training, workload: Workload) -> Schedule:
    """The first drawn schedule of ``workload`` that does what ``case`` says. Large models have the same groups in all
    cases, so that a reference serves several."""
    first = zlib.crc32(case.name.encode()) if case.size == "small" else 0
    for seed in range(first, first + MOST_SEEDS):
        schedule = _by_route(case, workload, seed)
        hosted = any(group.shard_rests == "host" for group in schedule.groups)
        if len(schedule.groups) < FEWEST_GROUPS * workload.parallel.pp or case.route not in _routes(schedule):
            continue
        if hosted == (case.shards == "host"):
            schedule = _with_states(case, _with_gradients(case, schedule, seed), workload)
            match.match(validate.validate(schedule), workload)
            if case.mode != "never whole":
                return schedule
            schedule = with_own_peak(schedule, workload)
            if any(copies_of_whole(schedule)):
                return schedule
    raise AssertionError(f"no schedule is drawn for {case.name}")


def _by_route(case: Training, workload: Workload, seed: int) -> Schedule:
    routes: dict[str, Route] = {"cpu_shard": "gpu"}
    schedule = draw_schedule(random.Random(seed), workload, (routes.get(case.route, case.route),))
    schedule = by_cpu_shard(schedule) if case.route == "cpu_shard" else schedule
    return with_host_shards(schedule, workload) if case.shards == "host" else schedule


def _routes(schedule: Schedule) -> set[str]:
    entries = itertools.chain.from_iterable((rank.start, *rank.steps) for rank in schedule.ranks)
    return {action.route for entry in entries for action in entry.unshard}


def _with_gradients(case: Training, schedule: Schedule, seed: int) -> Schedule:
    if case.gradients == "whole":
        return schedule
    draw, visits = random.Random(seed), schedule.parallel.num_microbatches
    kept = [dict(reduce_every=draw.randint(1, visits), alone=draw.random() < 0.4) for _ in schedule.groups]
    groups = (replace(group, gradients=case.gradients, **how) for group, how in zip(schedule.groups, kept))
    return replace(schedule, groups=tuple(groups))


def _with_states(case: Training, schedule: Schedule, workload: Workload) -> Schedule:
    numbers = range(len(schedule.groups))
    if case.states == "host and device":
        schedule = states_on_device(schedule, [*numbers[::2]])
    elif case.states == "drive":
        schedule = states_on_drive(schedule, workload, [n for n in numbers if n % 3 != 2], slots=2)
    if case.cast != "none":
        schedule = with_step_slots(schedule, workload, slots=2, cast=case.cast)
    if "early" in case.mode:
        early = [group for group in schedule.groups if can_step_early(group, workload)]
        schedule = replace(schedule, rollback_bytes=max(1, sum(saved_bytes(group, workload) for group in early)))
    return schedule
