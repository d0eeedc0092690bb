"""Pass: whether the host's optimizer steps groups during the backward, or after it."""

from msgspec.structs import replace

from megatron_ext.planner.candidate import Candidate
from megatron_ext.schedule.group_facts import can_step_early, saved_bytes
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, on_nodes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload

NAME = "host step"


def time_host_step(given: Candidate) -> Candidate:
    """The candidate with its simulated time. It gets ``rollback_bytes``, as many as steps during the backward need, if
    these steps make the iteration shorter and ``limits.host_bytes`` has room."""
    schedule, workload, timing = given.schedule, given.workload, given.timing
    us = given.simulated_us()
    if not can_time_steps(workload, timing):
        who = "the host steps" if workload.optimizer.on_host else "the device steps"
        return given.decided(NAME, f"{who} when all gradients are reduced")._replace(us=us)
    room = _room(schedule, workload)
    if room < (1 if schedule.state_slots is None else 0):
        said = "the host steps after the backward: its memory has no room for the states from before"
        return given.decided(NAME, said)._replace(us=us)
    tried = simulate(workload, timing, replace(schedule, rollback_bytes=room))
    times = f"an iteration takes {tried.iteration_time_us / 1e3:.3f} ms with steps during the backward and "
    times += f"{us / 1e3:.3f} ms without"
    if tried.iteration_time_us >= us:
        return given.decided(NAME, f"the host steps after the backward: {times}")._replace(us=us)
    said = f"the host steps during the backward: {times}"
    made = given.decided(NAME, said, rollback_bytes=max(tried.early_bytes))
    return made._replace(us=tried.iteration_time_us)


def can_time_steps(workload: Workload, timing: Timing) -> bool:
    """Whether a run can step during the backward and the table has the time of a step."""
    settings = workload.optimizer
    possible = settings.on_host and not settings.delayed and settings.gradient_dtype == "float32"
    return possible and timing.offers_host_step


def copies_of_states(schedule: Schedule, workload: Workload) -> list[int]:
    """By pipeline rank, bytes of the copies of states that are needed if all groups step during the backward."""
    of_ranks = [0] * workload.parallel.pp
    for group in schedule.groups:
        if can_step_early(group, workload):
            of_ranks[group.pp_rank] += saved_bytes(group, workload)
    return of_ranks


def _room(schedule: Schedule, workload: Workload) -> int:
    """Bytes of each rank for copies of states: enough for all groups that can be stepped early, or what the limit
    leaves."""
    room, limit = max(copies_of_states(schedule, workload)), workload.limits.host_bytes
    if limit is None:
        return room
    schedule = replace(schedule, rollback_bytes=0)  # slots of states on the drive become larger
    ranks_of_nodes = on_nodes(workload, [1] * workload.parallel.pp)
    held = host_bytes_of_nodes(schedule, workload)
    return min(room, *((limit - taken) // ranks for taken, ranks in zip(held, ranks_of_nodes) if ranks))
