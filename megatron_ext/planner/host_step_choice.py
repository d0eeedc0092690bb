"""Whether the host's optimizer steps beside the backward: where that is simulated to be faster."""

import msgspec

from megatron_ext.schedule.rollback import can_step_early, saved_bytes
from megatron_ext.schedule.state_placement import host_bytes_of_nodes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.nodes import pinned_bytes_of_nodes
from megatron_ext.workload.workload import Workload


def with_step_beside_backward(schedule: Schedule, workload: Workload, timing: Timing) -> Schedule:
    """The schedule with ``rollback_bytes``, as many as the simulated steps beside the backward take, where these make
    the iteration shorter and ``limits.host_bytes`` has room; else ``schedule``."""
    settings = workload.optimizer
    if not settings.on_host or settings.gradient_dtype != "float32" or not timing.offers_host_step:
        return schedule
    room = _room(schedule, workload)
    if room < 1:
        return schedule
    waits = run(workload, timing, schedule)
    tried = run(workload, timing, msgspec.structs.replace(schedule, rollback_bytes=room))
    if tried.iteration_time_us >= waits.iteration_time_us:
        return schedule
    return msgspec.structs.replace(schedule, rollback_bytes=max(tried.early_bytes))


def _room(schedule: Schedule, workload: Workload) -> int:
    """Bytes of each rank for copies of states: of all groups that can be stepped early, or what the limit leaves."""
    of_ranks = [0] * workload.parallel.pp
    for group in schedule.groups:
        if can_step_early(group, workload):
            of_ranks[group.pp_rank] += saved_bytes(group, workload)
    room, limit = max(of_ranks), workload.limits.host_bytes
    if limit is None:
        return room
    ranks_of_nodes = pinned_bytes_of_nodes(workload.parallel, [0] * workload.parallel.pp, [1] * workload.parallel.pp)
    held = host_bytes_of_nodes(schedule, workload)
    return min(room, *((limit - taken) // ranks for taken, ranks in zip(held, ranks_of_nodes) if ranks))


def step_note(schedule: Schedule) -> str | None:
    """What the host's steps beside the backward do, for the reader; None where there are none."""
    if schedule.rollback_bytes is None or schedule.predicted is None:
        return None
    ms = schedule.predicted.busy_us.get("host_step", 0.0) / 1e3
    return (
        f"The host's optimizer steps beside the backward, for {ms:.1f} ms on the busiest rank, with "
        f"{schedule.rollback_bytes} bytes of host memory a rank for the states as they were before."
    )
