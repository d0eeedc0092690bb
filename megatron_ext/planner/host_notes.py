"""What a plan does with the host's optimizer, in sentences; and what a delayed update would bring, which is said and
not chosen: it changes training."""

from operator import sub
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.bounds.memory_headroom import with_headroom
from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.finish import fastest_on_drive
from megatron_ext.schedule.memory_bill import host_bytes, memory_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


def step_note(schedule: Schedule) -> str | None:
    """What the host's steps during the backward do, for the reader; None where there are none."""
    if schedule.rollback_bytes is None or schedule.predicted is None:
        return None
    ms = schedule.predicted.busy_us.get("host_step", 0.0) / 1e3
    return (
        f"The host's optimizer steps during the backward, for {ms:.1f} ms on the busiest rank, with "
        f"{schedule.rollback_bytes} bytes of host memory a rank for the states as they were before. "
        "Where gradients are clipped (--clip-grad) these steps are made again at the end: the iteration takes longer."
    )


def _in_host_memory(schedule: Schedule, *places: str) -> Schedule:
    """The schedule with states in host memory that rest at ``places``."""
    groups = (replace(group, states_rest=None) if group.states_rest in places else group for group in schedule.groups)
    return replace(schedule, groups=tuple(groups))


def device_note(schedule: Schedule, workload: Workload, table: CostTable, *, extrapolate: bool = False) -> str | None:
    """How many bytes of states rest on the device while the host steps the others, and what that brings, for the
    reader; None where there are none."""
    groups = schedule.groups
    if schedule.predicted is None or not any(group.states_rest == "device" for group in groups):
        return None
    workload = with_activations(workload, table)
    timing = Timing(workload, table, extrapolate=extrapolate)
    held = max(
        sum(bill.memory.device_bytes.get(kind, 0) for kind in ("main_parameters", "optimizer_states"))
        for bill in memory_bill(schedule, workload)
    )
    said = f"Optimizer states of {held} bytes rest on the device of the rank that has most"
    without = replace(_in_host_memory(schedule, "device", "nvme"), state_slots=None, rollback_bytes=None)
    try:
        us = fastest_on_drive(Candidate(workload, timing, without)).simulated_us()
    except InputError:
        return f"{said}; without them there the host's memory would be short."
    ours = schedule.predicted.iteration_time_us
    return (
        f"{said}: an iteration is simulated to take {ours / 1e3:.1f} ms, and {us / 1e3:.1f} ms with all states in host "
        f"memory{' or on the drive' if workload.limits.host_bytes is not None else ''} ({us / ours - 1:.1%} more)."
    )


class Delay(NamedTuple):
    """An iteration with every update at once and with every update delayed, simulated; and by how much a delay raises
    what the host holds of a rank, the largest over ranks."""

    at_once_us: float
    delayed_us: float
    host_bytes: int

    def text(self) -> str:
        """One sentence for the reader: whether the delay pays in time. What it costs in loss no simulation says."""
        gain = 1.0 - self.delayed_us / self.at_once_us
        change = f"{abs(gain):.1%} {'less' if gain > 0 else 'more'}"
        return (
            f"With --delayed-parameter-update an iteration is simulated to take {self.delayed_us / 1e3:.1f} ms instead "
            f"of {self.at_once_us / 1e3:.1f} ({change}), with {abs(self.host_bytes)} bytes "
            f"{'more' if self.host_bytes >= 0 else 'less'} of host memory a rank: "
            f"{'it pays in time' if gain > 0 else 'it does not pay'}. It changes training, and loss was higher where "
            "it was tried, so it is never chosen here."
        )


def delay(schedule: Schedule, workload: Workload, table: CostTable, *, extrapolate: bool = False) -> Delay | None:
    """What delayed updates would bring by the same schedule, with states on the device in host memory instead; None
    where the table does not know the host's step."""
    settings = workload.optimizer
    if not settings.on_host:
        return None
    workload = with_activations(workload, table)
    works = [replace(workload, optimizer=replace(settings, delayed=d)) for d in (False, True)]
    timing = Timing(workload, table, extrapolate=extrapolate)
    if not timing.offers_host_step:
        return None
    plain = replace(_in_host_memory(schedule, "device"), rollback_bytes=None, step_slots=None)
    held = [
        [sum(kinds.values()) for kinds in host_bytes(*given)] for given in ((schedule, works[0]), (plain, works[1]))
    ]
    at_once, delayed = (run(work, timing, by).iteration_time_us for work, by in zip(works, (schedule, plain)))
    return Delay(at_once, delayed, max(map(sub, held[1], held[0])))


def offload_note(schedule: Schedule, workload: Workload, table: CostTable) -> str | None:
    """That whole gradients would have room with the optimizer on the host, for the reader; None where they would not,
    or nothing asks for it."""
    if workload.optimizer.on_host or not any(group.gradients for group in schedule.groups):
        return None
    missing = "--optimizer-cpu-offload" + " and --zero-stage 3" * (workload.zero_stage < 3)
    workload = with_activations(workload, table)
    settings = replace(workload.optimizer, on_host=True)
    try:
        with_headroom(replace(workload, zero_stage=3, optimizer=settings), "host")
    except InputError:
        return None
    return (
        "Gradients are reduced at every visit of their chunk, since whole ones have no room next to the optimizer. "
        f"With {missing} they would: describe and plan that too, and compare."
    )
