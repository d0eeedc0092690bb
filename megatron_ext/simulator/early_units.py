"""The host's steps that run during the backward (by group) or during the next iteration, as the engine simulates
them."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ext.schedule.group_facts import can_step_early, saved_bytes
from megatron_ext.schedule.memory_bill import states_on_drive_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload, optimizer_bytes


class EarlyUnit(NamedTuple):
    """The host's step of one group during the backward. ``us`` includes the copy of its states, of ``saved_bytes``, or
    the reads and writes of its states on the drive. ``spared_us`` and ``spared_drive_us`` are the times that it saves
    the optimizer and the drive at the end. ``visits``: the step follows this number of reduces."""

    bytes: int
    us: float
    saved_bytes: int
    spared_us: float
    spared_drive_us: float
    visits: int


class EarlySteps(NamedTuple):
    """Units by group, and the bytes of each rank for copies of states."""

    units: dict[int, EarlyUnit]
    rollback_bytes: int


class DelayedStep(NamedTuple):
    """The host's step of one rank during the next iteration. It takes ``us``, the longer of ``step_us`` and
    ``drive_us``; in the latter its states pass to the drive and back. ``rest_us`` is the optimizer's time that remains
    between the two iterations."""

    bytes: int
    step_us: float
    drive_us: float
    rest_us: float

    @property
    def us(self) -> float:
        return max(self.step_us, self.drive_us)


def delayed_steps(workload: Workload, timing: Timing, states_us: Sequence[float] = ()) -> list[DelayedStep]:
    """The delayed step of each pipeline rank; empty if updates are not delayed, or if the table has no times of the
    host's step.

    The copy of gradients to the host is a part of the host's step that stays between two iterations. New parameters are
    copied to the shards there as well. If states rest on the drive, ``states_us`` is the time in which they pass to it
    and back on each rank, during the step. The simulation does not model that this slows gathers by route ``nvme``.
    """
    if not workload.optimizer.delayed or not timing.knows_host_step():
        return []
    found = []
    for rank in range(workload.parallel.pp):
        size = optimizer_bytes(workload, rank)
        step_us, (copy_us, _) = timing.host_step_us(size), timing.to_host_us(2 * size)
        apply_us = timing.to_host_us(size)[0]
        rest_us = max(timing.optimizer_us(size) - step_us, 0.0) + copy_us + apply_us
        found.append(DelayedStep(size, max(step_us - copy_us, 0.0), sum(states_us[rank : rank + 1]), rest_us))
    return found


def early_steps(schedule: Schedule, workload: Workload, timing: Timing) -> EarlySteps | None:
    """The steps during the backward of a schedule; None if its optimizer waits for the gradient norm, or if the table
    has no times of the host's step."""
    if schedule.rollback_bytes is None or not timing.knows_host_step():
        return None
    cast = schedule.step_slots.cast if schedule.step_slots is not None else "host"
    units = {}
    for index, group in enumerate(schedule.groups):
        if can_step_early(group, workload):
            size = workload.parallel.as_dense(group.bytes, group.ranks)
            step_us = timing.host_step_us(size, cast)
            if group.states_rest == "nvme" and schedule.state_slots is not None:
                # While one slot is stepped, the drive writes the previous one and reads the next one.
                drive_us = timing.states_us(states_on_drive_bytes([group], workload), schedule.state_slots.slot_bytes)
                us = max(step_us, drive_us)
            else:
                drive_us, us = 0.0, step_us + timing.saved_states_us(size)
            visits = group.reduces(workload.parallel.num_microbatches)
            units[index] = EarlyUnit(size, us, saved_bytes(group, workload), step_us, drive_us, visits)
    return EarlySteps(units, schedule.rollback_bytes)
