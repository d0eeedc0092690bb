"""Pass: whether gradients and parameters pass to and from the host's optimizer through slots, and whether new
parameters are cast on the host or on the device."""

from typing import Literal

from msgspec.structs import replace

from megatron_ext.planner.candidate import Candidate
from megatron_ext.schedule.group_facts import largest_gradient
from megatron_ext.schedule.host_slots import LEAST_SLOTS, SLOTS, planned_slot_bytes
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, keeps_device_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule, StepSlots
from megatron_ext.workload.workload import Workload

NAME = "step slots"


def size_step_slots(given: Candidate) -> Candidate:
    """The candidate with slots, if the host then holds less than with Megatron's copy of all gradients. New parameters
    are cast where the table says that the host's step is shorter, if the device has room."""
    workload, timing, schedule = given.workload, given.timing, given.schedule
    on_host = [group for group in schedule.groups if group.states_rest is None]
    if not workload.optimizer.on_host:
        return given.decided(NAME, "none: the optimizer steps on the device")
    if not on_host:
        return given.decided(NAME, "none: no optimizer states are in host memory")
    if workload.optimizer.delayed:
        return given.decided(NAME, "none: updates are delayed")
    if not timing.offers_curve("host_step"):
        return given.decided(NAME, "none: the cost table has no times of the host's step")
    largest = max(largest_gradient(group, workload) for group in on_host)
    of_ranks = [0] * workload.parallel.pp
    for group in on_host:
        of_ranks[group.pp_rank] += 2 * group.bytes // group.ranks
    size = planned_slot_bytes(largest, max(of_ranks))

    casts: tuple[Literal["host", "device"], ...] = ("host", "device")
    times = {
        cast: sum(timing.among(group.ranks).host_step_us(group.bytes, cast) for group in on_host) for cast in casts
    }
    said = ", ".join(f"{us / 1e3:.3f} ms cast on the {cast}" for cast, us in times.items())
    limit, none = workload.limits.host_bytes, ""
    for cast in sorted(casts, key=times.__getitem__):
        for slots in (SLOTS, LEAST_SLOTS):
            tried = replace(schedule, step_slots=StepSlots(slots=slots, slot_bytes=size, cast=cast))
            if limit is None or max(host_bytes_of_nodes(tried, workload)) <= limit:
                break  # states that go to the drive would make room for more slots
        if not saves_host_memory(tried, workload):
            none = "none: they would take as much host memory as Megatron's copy of all gradients"
        elif not keeps_device_bytes(tried, workload):
            none = "none: the device has no room for them"
        else:
            text = f"{slots} slots of {size} bytes, parameters cast on the {cast}"
            text = f"{text}; the host's step of everything: {said}"
            return given.decided(NAME, text, step_slots=tried.step_slots)
    return given.decided(NAME, none)


def without_useless_slots(given: Candidate) -> Candidate:
    """The candidate without slots if they save nothing. This is so if no states are in host memory, or if so few are
    that a copy of their gradients takes no more than the slots. The candidate's time does not change."""
    schedule, workload, slots = given.schedule, given.workload, given.schedule.step_slots
    on_host = any(group.states_rest is None for group in schedule.groups)
    if slots is None or (on_host and (slots.cast == "device" or saves_host_memory(schedule, workload))):
        return given
    said = "none after all: so few states are left in host memory that slots save nothing"
    return given.decided(NAME, said, step_slots=None)._replace(us=given.us)


def saves_host_memory(schedule: Schedule, workload: Workload) -> bool:
    """Whether the node that holds most holds less with ``step_slots`` than without them."""
    held, without = (max(host_bytes_of_nodes(s, workload)) for s in (schedule, replace(schedule, step_slots=None)))
    return held < without
