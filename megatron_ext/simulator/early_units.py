"""What the host's optimizer can step beside the backward: by group, for the engine."""

from typing import NamedTuple

from megatron_ext.schedule.rollback import can_step_early, saved_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


class EarlyUnit(NamedTuple):
    """The step of one group. ``us``: with the copy of its states, of ``saved_bytes``; ``spared_us``: what the
    optimizer need not do at the end."""

    bytes: int
    us: float
    saved_bytes: int
    spared_us: float
    visits: int


class EarlySteps(NamedTuple):
    """Units by group, and the memory of each rank for copies of states."""

    units: dict[int, EarlyUnit]
    rollback_bytes: int


def early_steps(schedule: Schedule, workload: Workload, timing: Timing) -> EarlySteps | None:
    """Of a schedule whose optimizer steps beside the backward; None where it waits, or the table does not know it."""
    if schedule.rollback_bytes is None or not timing.offers_host_step:
        return None
    backwards = workload.parallel.num_microbatches
    units = {}
    for index, group in enumerate(schedule.groups):
        if can_step_early(group, workload):
            step_us = timing.host_step_us(group.bytes)
            visits = -(-backwards // group.reduce_every) if group.gradients is not None else 1
            units[index] = EarlyUnit(
                group.bytes,
                step_us + timing.saved_states_us(group.bytes),
                saved_bytes(group, workload),
                step_us,
                visits,
            )
    return EarlySteps(units, schedule.rollback_bytes)
