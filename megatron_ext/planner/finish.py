"""The passes behind the search, which placed gathers: step slots, rest states, host step."""

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.effort import is_small, last_found
from megatron_ext.planner.passes import rest_states
from megatron_ext.planner.passes.rest_states import rest_on_device, rest_on_drive
from megatron_ext.planner.passes.size_step_slots import size_step_slots, without_useless_slots
from megatron_ext.planner.passes.time_host_step import time_host_step
from megatron_ext.planner.problem import Problem
from megatron_ext.planner.within_memory import gathers_within_memory
from megatron_ext.schedule.user_defined_schedule import Schedule


def finished(given: Candidate) -> Candidate:
    """The candidate with states where the plan is simulated to be fastest: on the device where ``limits.device_bytes``
    leaves room, on the drive as ``limits.host_bytes`` asks for, with ``step_slots`` and steps during the backward.

    Raises:
        InputError: the limits cannot be kept.
    """
    found: list[Candidate] = []
    reasons: list[InputError] = []
    for tried in rest_on_device(size_step_slots(given), few=not is_small(given.workload)):
        try:
            found.append(fastest_on_drive(tried))
        except InputError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    best = min(found, key=Candidate.simulated_us)
    if len(found) > 1:
        times = ", ".join(f"{one.simulated_us() / 1e3:.3f}" for one in found)
        said = f"of {len(found)} choices, the first with none on the device, the fastest: {times} ms"
        best = best.decided(rest_states.NAME, said)
    return without_useless_slots(best)


def fastest_on_drive(given: Candidate) -> Candidate:
    """Of the choices of states on the drive the fastest. Raises InputError where host memory is short."""
    few = not is_small(given.workload)
    return min(map(time_host_step, rest_on_drive(given, few=few)), key=Candidate.simulated_us)


def finished_gathers(problem: Problem) -> Schedule:
    """The best plan by all-gathers alone within ``limits.device_bytes``; with the optimizer on the host its states rest
    and step as :func:`finished` chooses. The last is kept. Raises InputError where there is none."""
    workload, timing = problem[:2]

    def find() -> Schedule:
        schedule = gathers_within_memory(problem)
        return finished(Candidate(workload, timing, schedule)).schedule if workload.optimizer.on_host else schedule

    return last_found("finished_gathers", workload, timing, find)
