"""The optimizer's step as the engine simulates it: on the host during the backward (by group) or during the next
iteration, and at the end, on the host or on the device."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ext.schedule.group_facts import can_step_early, gradient_bytes, saved_bytes
from megatron_ext.schedule.memory_bill import states_on_drive_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload, optimizer_bytes

AROUND_ADD = 4 / 3
"""Passes over a gradient in host memory for its norm (1), clipping (2) and zeroing (1), divided by the passes of adding
another gradient to it (3)."""


class EarlyStep(NamedTuple):
    """The host's step of one group during the backward. ``us`` includes the copy of its states, of ``saved_bytes``, or
    the reads and writes of its states on the drive. ``spared_us`` and ``spared_drive_us`` are the times that it saves
    the optimizer and the drive at the end. ``visits``: the step follows this number of reduces."""

    bytes: int
    us: float
    saved_bytes: int
    spared_us: float
    spared_drive_us: float
    visits: int


class EarlyStepsByGroup(NamedTuple):
    """Units by group, and the bytes of each rank for copies of states."""

    units: dict[int, EarlyStep]
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


def early_steps(schedule: Schedule, workload: Workload, timing: Timing) -> EarlyStepsByGroup | None:
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
            units[index] = EarlyStep(size, us, saved_bytes(group, workload), step_us, drive_us, visits)
    return EarlyStepsByGroup(units, schedule.rollback_bytes)


def optimizer_us(schedule: Schedule, workload: Workload, timing: Timing) -> list[tuple[float, float, float]]:
    """By pipeline rank, three times in microseconds: the optimizer's whole step; the part that no step during the
    backward can spare (groups whose states are on the device, and work on gradients in host memory); and the part that
    the run steps on the host, group by group.

    If the schedule says how the host steps, or some states are elsewhere, Megatron's own step of these groups is
    replaced by the run's step or by the device's step, each counted as one step. Megatron issues the device's step
    first and then steps on the host, so on a GPU the two overlap. Their sum is the cautious figure. If the table has no
    times of the device's step, all groups are counted as stepped on the host, and ``device_step`` is in ``left_out``.

    Before a step on the device, gradients that were added up in host memory are copied to the device. After the step,
    new shards that rest in host memory are copied there. The host's step includes both. The processor computes the norm
    of gradients in host memory, clips them and zeroes them.
    """
    return [_of_rank(rank, schedule, workload, timing) for rank in range(workload.parallel.pp)]


def _of_rank(pp_rank: int, schedule: Schedule, workload: Workload, timing: Timing) -> tuple[float, float, float]:
    whole_us, run_us = timing.optimizer_us(optimizer_bytes(workload, pp_rank)), 0.0
    own = [group for group in schedule.groups if group.pp_rank == pp_rank]
    gradients = [(gradient_bytes(g, workload), timing.among(g.ranks)) for g in own if g.gradients == "host"]
    rest_us = sum(AROUND_ADD * of_ranks.to_host_us(size)[1] for size, of_ranks in gradients)  # norm, clipping, zeroing
    if not workload.optimizer.on_host:
        rest_us += sum(_moved_us(group, timing.among(group.ranks)) for group in own)
        return whole_us + rest_us, rest_us, 0.0
    on_device = [group for group in own if group.states_rest == "device"]
    if on_device and not timing.offers_device_step:
        timing.leave_out("device_step")
        return whole_us, 0.0, 0.0
    slots = schedule.step_slots
    in_units = slots is not None or schedule.rollback_bytes is not None
    by_run = [group for group in own if group.states_rest == "nvme" or (group.states_rest is None and in_units)]
    dense = workload.parallel.as_dense
    host_bytes, device_bytes = (sum(dense(g.bytes, g.ranks) for g in groups) for groups in (by_run, on_device))
    if timing.offers_curve("host_step"):
        if host_bytes:
            run_us = timing.host_step_us(host_bytes, slots.cast if slots is not None else "host")
            whole_us += run_us - timing.own_host_step_us(host_bytes)
        if device_bytes:
            whole_us -= timing.own_host_step_us(device_bytes)
    if device_bytes:
        rest_us += timing.device_step_us(device_bytes)
        rest_us += sum(_moved_us(group, timing.among(group.ranks)) for group in on_device)
    return whole_us + rest_us, rest_us, run_us


def _moved_us(group: Group, timing: Timing) -> float:
    """Microseconds of the copies between host memory and the device before and after a step on the device."""
    from_host = timing.from_host_us(group.bytes) if group.gradients == "host" else 0.0
    return from_host + (timing.shard_to_host_us(group.bytes) if group.shard_rests == "host" else 0.0)
