"""Pass: where optimizer states rest if the host steps: in host memory, on the device as far as there is room, or on the
drive as far as ``limits.host_bytes`` requires it."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import product

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.effort import is_small
from megatron_ext.planner.passes.time_host_step import can_time_steps, copies_of_states
from megatron_ext.planner.states_on_drive import with_states_on_drive
from megatron_ext.schedule.group_facts import can_step_early, uses_of_groups
from megatron_ext.schedule.host_slots import step_slots_bytes
from megatron_ext.schedule.memory_bill import keeps_device_bytes, memory_bill, on_nodes, resting_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import kind_of
from megatron_ext.workload.workload import Workload

NAME = "rest states"

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the room on the device (by the memory bill) that states are given."""

RESERVED = (0.5, 1.0)
"""Shares of the states of the rank with the most states for which further plans leave room."""

LEAST_GAIN = 0.01
"""Share of the iteration time that all states on the device must save, or such plans are not made."""

PARTS = (0.0, 0.5, 1.0)
"""If all groups step during the backward: shares of the copies that this needs, for which states on the drive leave
room."""


def rest_as_must(given: Candidate) -> Candidate:
    """The candidate with as few states on the drive as necessary, and none on the device.

    Raises:
        InputError: host memory is short even then.
    """
    return _on_drive(given, with_states_on_drive(given.schedule, given.workload))


def rest_on_device(given: Candidate) -> Iterator[Candidate]:
    """The candidate as it is, and candidates with states on the device, together with the gradients and shards of their
    groups. For each share of the room, groups are chosen until it is filled: those whose steps overlap least with the
    backward, or the largest first, which leaves the least room unused. Only candidates that differ are made. If the
    workload is not small, only all of the room is filled."""
    yield given
    schedule, workload = given.schedule, given.workload
    if not may_rest_on_device(workload, given.timing):
        return
    late = by_hidden_steps(schedule, workload)
    shares = SHARES if is_small(workload) else SHARES[-1:]
    for share, tried in with_states_on_device(schedule, workload, late, shares):
        moved = [index for index, group in enumerate(tried.groups) if group.states_rest == "device"]
        said = f"on the device, within {share:.0%} of the room that other memory leaves there"
        yield given.decided(NAME, said, moved, groups=tried.groups)


def rest_on_drive(given: Candidate) -> Iterator[Candidate]:
    """Candidates with states on the drive as ``limits.host_bytes`` requires it.

    There are several choices of groups if the workload is small. Either the largest groups are chosen, or the
    groups whose states the drive can read and write during most of the backward, because their gradients are reduced
    first. Either as few as necessary are chosen, or more, so that host memory has room for the copies that steps during
    the backward need.

    Raises:
        InputError: host memory is short even then.
    """
    schedule, workload, timing = given.schedule, given.workload, given.timing
    placed = with_states_on_drive(schedule, workload)
    yield _on_drive(given, placed)
    limits = workload.limits
    has_drive = all(map(timing.offers_curve, ("routes.nvme", "publish.nvme"))) and (
        placed.state_slots is not None or limits.nvme_slots > 0
    )
    if limits.host_bytes is None or not has_drive or not is_small(workload) or not can_time_steps(workload, timing):
        return
    copies, seen = max(on_nodes(workload, copies_of_states(schedule, workload))), [placed]
    for order, part in product((None, by_hidden_steps(schedule, workload)[::-1]), PARTS):
        left = workload.with_limits(host_bytes=limits.host_bytes - int(part * copies))
        with contextlib.suppress(InputError):  # this much room cannot be left
            tried = with_states_on_drive(schedule, left, order)
            if tried not in seen:
                seen.append(tried)
                yield _on_drive(given, tried, order is not None, part)


def _on_drive(given: Candidate, tried: Schedule, reduced_first: bool = False, part: float = 0.0) -> Candidate:
    moved = [index for index, group in enumerate(tried.groups) if group.states_rest == "nvme"]
    if not moved:
        where = "in host memory" if given.workload.optimizer.on_host else "on the device, where the optimizer steps"
        return given.decided(NAME, where, [i for i, g in enumerate(tried.groups) if g.states_rest is None])
    whose = "those whose gradient is reduced first" if reduced_first else "the largest groups first"
    said = f"on the drive, as limits.host_bytes {given.workload.limits.host_bytes} asks for: {whose}"
    said += f", with room left for {part:.0%} of the copies that steps during the backward need" if part > 0 else ""
    made = given.decided(NAME, said, moved, groups=tried.groups, state_slots=tried.state_slots)
    rest = [i for i, group in enumerate(tried.groups) if group.states_rest is None]
    return made.decided(NAME, "in host memory, which has room for them", rest)


def by_hidden_steps(schedule: Schedule, workload: Workload) -> list[int]:
    """Groups ordered by how much their steps overlap with the backward, the least first: groups that must wait, then
    groups whose gradients are reduced last."""
    hides = [
        (can_step_early(group, workload), group.model_chunk_id, layers)
        for group, layers in zip(schedule.groups, uses_of_groups(schedule.groups, workload))
    ]
    return sorted(range(len(hides)), key=hides.__getitem__)


def may_rest_on_device(workload: Workload, timing: Timing) -> bool:
    """Whether states can rest on the device while the optimizer steps on the host: the table has figures for both
    steps, and a limit says how much room there is."""
    settings, timed = workload.optimizer, timing.offers_device_step
    return settings.on_host and not settings.delayed and timed and workload.limits.device_bytes is not None


def with_states_on_device(
    schedule: Schedule, workload: Workload, order: Sequence[int], shares: Sequence[float]
) -> Iterator[tuple[float, Schedule]]:
    """For each share of the room on the device: the share, and the schedule with the states of the groups that fit into
    it, chosen in this order or the largest first. Only schedules that differ."""
    limit = workload.limits.device_bytes
    assert limit is not None
    left = [limit - max(bill.step_device_bytes) for bill in memory_bill(schedule, workload)]
    # Shards that come by cpu_shard have to rest in host memory.
    stays = {action.group for action in schedule.unshards if kind_of(action.route).shard_from_host}
    given = schedule.groups
    moved = {index: moved_group(given[index]) for index in order if index not in stays}
    need = {i: device_bytes(group, workload) - device_bytes(given[i], workload) for i, group in moved.items()}
    seen = [given]
    largest = sorted(moved, key=lambda index: -need[index])
    for share, chosen in product(shares, (list(moved), largest)):
        room, groups = [int(share * size) for size in left], list(given)
        for index in chosen:
            group = moved[index]
            if need[index] <= room[group.pp_rank]:
                room[group.pp_rank] -= need[index]
                groups[index] = group
        made = replace(schedule, groups=tuple(groups))
        if not keeps_device_bytes(made, workload):
            # The reduce of a gradient that comes and goes waits for the previous one, whose whole gradient it frees.
            made = replace(made, groups=tuple(map(_with_shard_of_gradient, given, groups)))
        if made.groups not in seen:
            seen.append(made.groups)
            yield share, made


def _with_shard_of_gradient(before: Group, group: Group) -> Group:
    came = before.gradients is not None and group.gradients is None
    return replace(before, gradients="sharded", states_rest="device", shard_rests=None) if came else group


def bytes_to_reserve(given: Candidate) -> list[int]:
    """Numbers of device bytes that further plans leave free: for the slot in which new parameters are cast, and for
    states. Empty below zero stage 3, where whole parameters do not take the remaining room. Also empty if states on the
    device would not shorten the iteration by :data:`LEAST_GAIN`."""
    schedule, workload = given.schedule, given.workload
    if workload.zero_stage < 3 or not may_rest_on_device(workload, given.timing):
        return []
    slots, groups = schedule.step_slots, tuple(map(moved_group, schedule.groups))
    others = [replace(schedule, groups=groups)]
    others += [replace(schedule, step_slots=replace(slots, cast="device"))] if slots and slots.cast == "host" else []
    us, *times = (simulate(workload, given.timing, each).iteration_time_us for each in (schedule, *others))
    gains = [other_us <= us * (1 - LEAST_GAIN) for other_us in times]
    found = [step_slots_bytes(others[-1], workload, list(schedule.groups))[1]] if slots and any(gains[1:]) else []
    if not gains[0]:
        return found
    of_ranks = [0] * workload.parallel.pp
    for group, moved in zip(schedule.groups, groups):
        of_ranks[group.pp_rank] += device_bytes(moved, workload) - device_bytes(group, workload)
    return found + [int(share * max(of_ranks)) for share in RESERVED]


def moved_group(group: Group) -> Group:
    """The group with its states on the device, and with everything that the device's step reads and writes there."""
    moved = replace(group, states_rest="device", shard_rests=None)
    if group.gradients != "host":
        return moved
    if group.ranks > 1:
        return replace(moved, gradients="sharded")
    # With one rank, a whole gradient takes as many bytes as its shard.
    return replace(moved, gradients=None, reduce_every=1, alone=False)


def device_bytes(group: Group, workload: Workload) -> int:
    """Bytes that the group alone holds on the device during the whole iteration. Several groups hold at most their
    sum."""
    return sum(resting_bytes([group], workload)[0].values())
