"""Where optimizer states rest, and whether the host steps beside the backward, by simulation. What a delayed update
would bring is said and not chosen: it changes training."""

import contextlib
from itertools import product
from operator import sub
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.bounds.memory_headroom import with_headroom
from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.device_states import SHARES, may_rest_on_device, with_states_on_device
from megatron_ext.planner.search_state import POLISHED_STEPS, number_of_steps
from megatron_ext.planner.step_slots_choice import with_step_slots, without_useless_slots
from megatron_ext.schedule.group_uses import uses_of_groups
from megatron_ext.schedule.memory_bill import host_bytes, memory_bill
from megatron_ext.schedule.rollback import can_step_early, saved_bytes
from megatron_ext.schedule.state_placement import host_bytes_of_nodes, with_states_on_drive
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.nodes import pinned_bytes_of_nodes
from megatron_ext.workload.workload import Workload

PARTS = (0.0, 0.5, 1.0)
"""Of the copies that steps beside the backward of all groups need, what states on the drive leave room for."""


def with_states_placed(schedule: Schedule, workload: Workload, timing: Timing) -> Schedule:
    """The schedule with states on the device where ``limits.device_bytes`` leaves room and that is simulated to be
    faster, on the drive as ``limits.host_bytes`` asks for, with steps beside the backward, and with ``step_slots``.

    Raises:
        InputError: the limits cannot be kept.
    """
    schedule = replace(_in_host_memory(schedule, "nvme"), state_slots=None)  # a search has placed some
    schedule = with_step_slots(schedule, workload, timing)
    tried, late = [schedule], _late(schedule, workload)
    if may_rest_on_device(workload, timing):
        shares = SHARES if is_small(workload) else SHARES[-1:]
        tried += with_states_on_device(schedule, workload, late, shares)
    found: list[tuple[float, Schedule]] = []
    reasons: list[InputError] = []
    for each in tried:
        try:
            found.append(_within_host_memory(each, workload, timing, late[::-1]))
        except InputError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return without_useless_slots(min(found, key=lambda item: item[0])[1], workload)


def is_small(workload: Workload) -> bool:
    """Whether several whole plans can be simulated."""
    return number_of_steps(workload) <= POLISHED_STEPS


def _late(schedule: Schedule, workload: Workload) -> list[int]:
    """Groups in the order in which their steps hide less beside the backward: those that wait, and those whose gradient
    is reduced last."""
    hides = [
        (can_step_early(group, workload), group.model_chunk_id, layers)
        for group, layers in zip(schedule.groups, uses_of_groups(schedule.groups, workload))
    ]
    return sorted(range(len(hides)), key=hides.__getitem__)


def _within_host_memory(
    schedule: Schedule, workload: Workload, timing: Timing, first: list[int]
) -> tuple[float, Schedule]:
    """Its iteration time and the schedule, with states on the drive as ``limits.host_bytes`` asks for.

    Of several choices of groups the one that is simulated to be fastest: the largest; or those whose states the drive
    reads and writes beside most of the backward, because their gradient is reduced ``first``. Either as few as must be,
    or more, so that the others have room for the copies that such steps need.
    """
    placed = with_states_on_drive(schedule, workload)
    us, best = _stepped(placed, workload, timing)
    limits = workload.limits
    has_drive = all(map(timing.offers_curve, ("routes.nvme", "publish.nvme"))) and (
        placed.state_slots is not None or limits.nvme_slots > 0
    )
    if limits.host_bytes is None or not has_drive or not is_small(workload) or not _can_step_early(workload, timing):
        return us, best
    copies = max(pinned_bytes_of_nodes(workload.parallel, {}, _copies(schedule, workload)))
    seen = [placed]
    for order, part in product((None, first), PARTS):
        left = replace(limits, host_bytes=limits.host_bytes - int(part * copies))
        with contextlib.suppress(InputError):  # so much room cannot be left
            tried = with_states_on_drive(schedule, replace(workload, limits=left), order)
            if tried not in seen:
                seen.append(tried)
                us, best = min((us, best), _stepped(tried, workload, timing), key=lambda found: found[0])
    return us, best


def _can_step_early(workload: Workload, timing: Timing) -> bool:
    settings = workload.optimizer
    return (
        settings.on_host and not settings.delayed and settings.gradient_dtype == "float32" and timing.offers_host_step
    )


def _stepped(schedule: Schedule, workload: Workload, timing: Timing) -> tuple[float, Schedule]:
    """Its simulated iteration time and the schedule; with ``rollback_bytes``, as many as the steps beside the backward
    take, where these make the iteration shorter and ``limits.host_bytes`` has room."""
    waits = run(workload, timing, schedule).iteration_time_us, schedule
    room = _room(schedule, workload) if _can_step_early(workload, timing) else -1
    if room < (1 if schedule.state_slots is None else 0):
        return waits
    tried = run(workload, timing, replace(schedule, rollback_bytes=room))
    if tried.iteration_time_us >= waits[0]:
        return waits
    return tried.iteration_time_us, replace(schedule, rollback_bytes=max(tried.early_bytes))


def _copies(schedule: Schedule, workload: Workload) -> list[int]:
    """By pipeline rank, bytes of the copies of states that steps beside the backward need, of all groups."""
    of_ranks = [0] * workload.parallel.pp
    for group in schedule.groups:
        if can_step_early(group, workload):
            of_ranks[group.pp_rank] += saved_bytes(group, workload)
    return of_ranks


def _room(schedule: Schedule, workload: Workload) -> int:
    """Bytes of each rank for copies of states: of all groups that can be stepped early, or what the limit leaves."""
    room, limit = max(_copies(schedule, workload)), workload.limits.host_bytes
    if limit is None:
        return room
    schedule = replace(schedule, rollback_bytes=0)  # slots of states on the drive become larger
    ranks_of_nodes = pinned_bytes_of_nodes(workload.parallel, {}, [1] * workload.parallel.pp)
    held = host_bytes_of_nodes(schedule, workload)
    return min(room, *((limit - taken) // ranks for taken, ranks in zip(held, ranks_of_nodes) if ranks))


def step_note(schedule: Schedule) -> str | None:
    """What the host's steps beside the backward do, for the reader; None where there are none."""
    if schedule.rollback_bytes is None or schedule.predicted is None:
        return None
    ms = schedule.predicted.busy_us.get("host_step", 0.0) / 1e3
    return (
        f"The host's optimizer steps beside the backward, for {ms:.1f} ms on the busiest rank, with "
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
        us, _ = _within_host_memory(without, workload, timing, _late(without, workload)[::-1])
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
        "Gradients are reduced at every visit of their chunk, since whole ones have no room beside the optimizer. With "
        f"{missing} they would: describe and plan that too, and compare."
    )
