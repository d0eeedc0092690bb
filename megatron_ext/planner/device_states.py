"""Which groups keep their optimizer states on the device while the host steps the others, in the room that is left."""

from collections.abc import Iterator, Sequence
from itertools import product

from msgspec.structs import replace

from megatron_ext.schedule.memory_bill import memory_bill, resting_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.simulation import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload

RESERVED = (0.5, 1.0)
"""Of the states of the rank that has most of them, what further plans leave room for."""

LEAST_GAIN = 0.01
"""Share of the iteration that all states on the device must bring before such plans are made."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the room that the memory bill leaves."""


def may_rest_on_device(workload: Workload, timing: Timing) -> bool:
    """Whether states can rest there while the optimizer steps on the host, the table says what both steps take, and a
    limit says how much room there is."""
    settings = workload.optimizer
    known = timing.offers_device_step and workload.limits.device_bytes is not None
    return settings.on_host and not settings.delayed and known


def with_states_on_device(
    schedule: Schedule, workload: Workload, late: Sequence[int], shares: Sequence[float] = SHARES
) -> Iterator[Schedule]:
    """The schedule with states of as many groups on the device as each share of the room holds, with their gradients
    and shards; in this order, or the largest first, which leaves least of the room. Only schedules that differ."""
    limit = workload.limits.device_bytes
    assert limit is not None
    left = [limit - max(bill.step_device_bytes) for bill in memory_bill(schedule, workload)]
    given, stays = schedule.groups, _by_cpu_shard(schedule)
    moved = {index: moved_group(given[index]) for index in late if index not in stays}
    need = {i: device_bytes(group, workload) - device_bytes(given[i], workload) for i, group in moved.items()}
    seen = [given]
    largest = sorted(moved, key=lambda index: -need[index])
    for share, order in product(shares, (list(moved), largest)):
        room, groups = [int(share * size) for size in left], list(given)
        for index in order:
            group = moved[index]
            if need[index] <= room[group.pp_rank]:
                room[group.pp_rank] -= need[index]
                groups[index] = group
        if tuple(groups) not in seen:
            seen.append(tuple(groups))
            yield replace(schedule, groups=seen[-1])


def bytes_to_reserve(schedule: Schedule, workload: Workload, timing: Timing) -> list[int]:
    """Bytes of the device to leave free by further plans: for the slot in which new parameters are cast, and for
    states. Nothing for what would not make the iteration shorter by :data:`LEAST_GAIN`."""
    slots, groups = schedule.step_slots, tuple(map(moved_group, schedule.groups))
    others = [replace(schedule, groups=groups)]
    others += [replace(schedule, step_slots=replace(slots, cast="device"))] if slots and slots.cast == "host" else []
    us, *times = (run(workload, timing, each).iteration_time_us for each in (schedule, *others))
    gains = [other_us <= us * (1 - LEAST_GAIN) for other_us in times]
    found = [slots.slot_bytes] if slots and any(gains[1:]) else []
    if not gains[0]:
        return found
    of_ranks = [0] * workload.parallel.pp
    for group, moved in zip(schedule.groups, groups):
        of_ranks[group.pp_rank] += device_bytes(moved, workload) - device_bytes(group, workload)
    return found + [int(share * max(of_ranks)) for share in RESERVED]


def moved_group(group: Group) -> Group:
    """The group with its states on the device, and there what the device's step reads and writes."""
    gradients = "sharded" if group.gradients == "host" else group.gradients
    return replace(group, states_rest="device", shard_rests=None, gradients=gradients)


def device_bytes(group: Group, workload: Workload) -> int:
    """What the group alone takes on the device throughout the iteration. Several take no more than their sum."""
    return sum(resting_bytes([group], workload)[0].values())


def _by_cpu_shard(schedule: Schedule) -> set[int]:
    """Groups whose shards have to rest in host memory."""
    entries = [entry for rank in schedule.ranks for entry in (rank.start, *rank.steps)]
    return {action.group for entry in entries for action in entry.unshard if action.route == "cpu_shard"}
