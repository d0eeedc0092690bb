"""How long the optimizer's step takes by where groups are stepped: on the host, or on the device."""

from megatron_ext.schedule.host_slots import gradient_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload, optimizer_bytes

AROUND_ADD = 4 / 3
"""Passes over a gradient in host memory for its norm (1), clipping (2) and zeroes (1), as a share of those that adding
another to it takes."""


def optimizer_us(schedule: Schedule, workload: Workload, timing: Timing) -> list[tuple[float, float, float]]:
    """By pipeline rank, microseconds of the optimizer's whole step, and of the part that no step during the backward
    spares: that of the groups whose states are on the device, and what is done with gradients in host memory. And of
    its part that the run steps on the host, group by group.

    Where the schedule says how the host steps, or some states are elsewhere, Megatron's own step of these groups is
    replaced by the run's, or by the device's, each of them as one step. Megatron issues the device's step first and
    then steps on the host, so on a GPU the two overlap; their sum is the cautious figure. A table that does not know
    the device's step has all groups stepped on the host; ``device_step`` is then in ``left_out``.

    Before a step on the device come its gradients that were added up in host memory, and after it the new shards go to
    those that rest there; the host's step has both. Gradients that rest in host memory are normed, clipped and zeroed
    by the processor.
    """
    return [_of_rank(rank, schedule, workload, timing) for rank in range(workload.parallel.pp)]


def _of_rank(pp_rank: int, schedule: Schedule, workload: Workload, timing: Timing) -> tuple[float, float, float]:
    whole_us, run_us = timing.optimizer_us(optimizer_bytes(workload, pp_rank)), 0.0
    own = [group for group in schedule.groups if group.pp_rank == pp_rank]
    rest_us = sum(_around_us(group, workload, timing.among(group.ranks)) for group in own if group.gradients == "host")
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


def _around_us(group: Group, workload: Workload, timing: Timing) -> float:
    """What the processor does with a gradient that rests in host memory before its step."""
    return AROUND_ADD * timing.to_host_us(gradient_bytes(group, workload))[1]


def _moved_us(group: Group, timing: Timing) -> float:
    """Copies between host memory and the device around a step on the device."""
    from_host = timing.from_host_us(group.bytes) if group.gradients == "host" else 0.0
    return from_host + (timing.shard_to_host_us(group.bytes) if group.shard_rests == "host" else 0.0)
