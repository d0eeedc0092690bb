"""Schedules for the other numbers of micro-batches that a growing batch has. They use the memory layout of the planned
schedule; only gathers are placed again."""

from collections.abc import Iterator
from math import inf

from msgspec.structs import replace

from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.baselines import BASELINES
from megatron_ext.planner.blocks import Blocks, blocks_of_groups
from megatron_ext.planner.passes.cut_groups import fits
from megatron_ext.planner.passes.place_gathers import Choices, place_gathers
from megatron_ext.planner.place_choices import horizons
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.schedules import clamped
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import simulate, with_prediction
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import ON_DRIVE, ON_HOST, ROUTES, Route
from megatron_ext.workload.workload import Workload

SIMULATED = 3
"""How many of the best horizons by estimate the simulator judges."""


def plan_ramp(planned: Schedule, workload: Workload, table: CostTable, *, extrapolate: bool = False) -> list[Schedule]:
    """A schedule for every number in ``workload.ramp``, which a run of ``planned`` can change to between iterations.

    Raises:
        InputError: no schedule of these groups fits at some number.
    """
    found = []
    for number in workload.ramp:
        other = with_activations(workload.with_microbatches(number), table)
        timing = Timing(other, table, extrapolate=extrapolate)
        best_us, best = inf, None
        for tried in _candidates(planned, other, timing):
            try:
                match(validate(tried), other)
                us = simulate(other, timing, tried, bound_us=0.0).iteration_time_us
            except InputError:  # this schedule does not fit into memory
                continue
            if us < best_us:
                best_us, best = us, tried
        if best is None:
            why = f"no schedule fits with the groups planned for {planned.parallel.num_microbatches} micro-batches"
            raise InputError(f"{why}; plan with policy hybrid", field="ramp", value=number)
        result = simulate(other, timing, best, bound_us=lower_bound(other, timing))
        found.append(with_prediction(best, result._replace(memory=tuple(memory_bill(best, other)))))
    return found


def ramp_us(ramp: list[Schedule]) -> dict[int, float]:
    """Predicted iteration times in microseconds, by number of micro-batches."""
    return {one.parallel.num_microbatches: one.predicted.iteration_time_us for one in ramp if one.predicted is not None}


def ramp_note(ramp: list[Schedule]) -> str | None:
    """What was planned in addition to the plan, for the reader; None if nothing was."""
    times = ", ".join(f"{number}: {us / 1e3:.3f} ms" for number, us in ramp_us(ramp).items())
    return f"Before the batch is full, by number of micro-batches: {times}." if ramp else None


def _candidates(planned: Schedule, workload: Workload, timing: Timing) -> Iterator[Schedule]:
    """The schedule of the rule that the plan follows, or else schedules with gathers placed by several horizons."""
    name = planned.metadata.options.rule or planned.metadata.planner
    if name in BASELINES and name != "gathers-only":  # gathers-only is a search, not a rule
        try:
            yield _in_memory_of(planned, BASELINES[name][1](workload, timing))
            return
        except InputError:  # the rule makes other groups for this number of micro-batches
            pass
    limit = max(device_peaks(planned)) if workload.zero_stage == 3 else workload.limits.whole_parameter_bytes
    limited = workload.with_limits(whole_parameter_bytes=limit)
    number = workload.parallel.num_microbatches
    blocks = blocks_of_groups(workload, tuple(clamped(group, number) for group in planned.groups))
    if not fits(limited, blocks):
        return
    plans = (place_gathers(limited, timing, blocks, choices) for choices in _choices(planned, blocks, limited, timing))
    for plan in sorted(plans, key=lambda plan: plan.end_us)[:SIMULATED]:
        made = assemble(workload, blocks.groups, plan.placed, plan.freed, planner=planned.metadata.planner)
        yield _in_memory_of(planned, made)


def _choices(planned: Schedule, blocks: Blocks, workload: Workload, timing: Timing) -> Iterator[Choices]:
    """Choices with the plan's routes, its host copies and its copies on the drive, one for every horizon."""
    used = {action.route for action in planned.unshards}
    routes: tuple[Route, ...] = tuple(route for route in ROUTES if route in used)
    hosted = frozenset(entry.group for entry in planned.publish if ON_HOST in entry.to)
    staged = frozenset(entry.group for entry in planned.publish if ON_DRIVE in entry.to)
    from_host = frozenset(index for index, group in enumerate(blocks.groups) if group.shard_rests == "host")
    for horizon_us in horizons(workload, timing):
        yield Choices(horizon_us, routes, hosted, staged, from_host=from_host)


def _in_memory_of(planned: Schedule, made: Schedule) -> Schedule:
    """The steps of ``made`` with everything else taken from ``planned``.

    Raises:
        InputError: ``made`` has other groups than ``planned``.
    """
    number = made.parallel.num_microbatches
    groups = tuple(clamped(group, number) for group in planned.groups)
    if [group.parameters for group in groups] != [group.parameters for group in made.groups]:
        raise InputError("has other groups than the plan", field="groups")
    return replace(planned, parallel=made.parallel, ranks=made.ranks, groups=groups, predicted=None)
