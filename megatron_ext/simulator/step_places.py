"""How long the optimizer's step takes by where groups are stepped: on the host, or on the device."""

from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload, optimizer_bytes


def optimizer_us(schedule: Schedule, workload: Workload, timing: Timing) -> list[tuple[float, float]]:
    """By pipeline rank, microseconds of the optimizer's whole step, and of the part that no step beside the backward
    spares: that of the groups whose states are on the device.

    The step of everything on the host becomes shorter by the host's step of these groups and longer by the device's,
    each of them as one step. Megatron issues the device's step first and then steps on the host, so on a GPU the two
    overlap; their sum is the cautious figure. Where new parameters become 16-bit ones on the device, the host's step of
    the others takes as much longer or shorter as the table says. A table that does not know the device's step has all
    groups stepped on the host; ``device_step`` is then in ``left_out``.

    Before a step on the device come its gradients that were added up in host memory, and after it the new shards go to
    those that rest there; the host's step has both.
    """
    return [_of_rank(rank, schedule, workload, timing) for rank in range(workload.parallel.pp)]


def _of_rank(pp_rank: int, schedule: Schedule, workload: Workload, timing: Timing) -> tuple[float, float]:
    whole_us = timing.optimizer_us(optimizer_bytes(workload, pp_rank))
    bytes_of: dict[str | None, int] = {"device": 0, None: 0}
    own = [group for group in schedule.groups if group.pp_rank == pp_rank]
    for group in own:
        if group.states_rest in bytes_of:
            bytes_of[group.states_rest] += workload.parallel.as_dense(group.bytes, group.ranks)
    on_device, on_host = bytes_of["device"], bytes_of[None]
    if workload.optimizer.on_host:
        stepped = [group for group in own if group.states_rest == "device"]
    else:
        stepped, on_host = own, 0
    moved_us = sum(_moved_us(group, timing.among(group.ranks)) for group in stepped)
    if on_host and schedule.step_slots is not None and timing.offers_curve("host_step"):
        whole_us += timing.host_step_us(on_host, schedule.step_slots.cast) - timing.host_step_us(on_host)
    if not on_device:
        return whole_us + moved_us, 0.0
    if not timing.offers_device_step:
        timing.leave_out("device_step")
        return whole_us, 0.0
    device_us = timing.device_step_us(on_device) + moved_us
    return whole_us - timing.host_step_us(on_device) + device_us, device_us


def _moved_us(group: Group, timing: Timing) -> float:
    """Copies between host memory and the device around a step on the device."""
    from_host = timing.from_host_us(group.bytes) if group.gradients == "host" else 0.0
    return from_host + (timing.shard_to_host_us(group.bytes) if group.shard_rests == "host" else 0.0)
