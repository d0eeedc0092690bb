"""The memory bill: the bytes that every rank holds by a schedule, by kind, at its peak and by step.

[Note: What is counted]
* Whole parameters from the issue of an unshard to the reshard. At zero stages 1 and 2: all of them, always.
* Shards with storage of their own (zero stage 3), on the device or in host memory as the schedule says. At zero stages
  1 and 2 a shard is a view of the whole group.
* Gradients with Megatron's padding, in one of two ways. Either the whole gradient stays throughout the iteration. Or
  the shard stays, and the whole gradient exists from just before the backward of the group's last layer until the rank
  issues its next reduce or allocates a gradient ``alone``, both of which wait for this reduce. With ``reduce_every``
  above 1 the whole gradient stays through several backward steps.
* All gradients that rest in host memory, while an optimizer on the device steps: it copies them to the device.
* Buffers for hierarchical and symmetric all-gathers and for pieces of ``cpu_shard``, as large as the largest group
  needs.
* The optimizer's copies of 16-bit parameters and its states, for the elements of the rank's shards without padding.
  The bill is that of the data-parallel rank that holds the most.
* Slots for states on the drive, with room for gradients. All other gradients pass to the host's optimizer through
  ``step_slots``. If the schedule has no ``step_slots``, Megatron copies them to memory that it keeps. For groups that
  Megatron steps on the device it keeps fp32 copies of 16-bit gradients there.
* Activations: the tensors that autograd saves in each layer, from the layer's forward to its backward, for every
  micro-batch in flight, and the tensors that the backward in progress recomputes.

Not counted: memory that a layer's kernels allocate and free again within the layer, ``parameter.grad`` until it is
added to the gradient buffer, messages between stages that no layer has saved, and memory of communication libraries.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy

from megatron_ext.formats import rank_memory
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.schedule import host_slots
from megatron_ext.schedule.bill_by_step import Moment, moments
from megatron_ext.schedule.footprint import bounce_bytes, slot_bytes
from megatron_ext.schedule.group_facts import members_of
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.workload.bucket_layout import shard_parts
from megatron_ext.workload.nodes import nodes_spanned, pinned_bytes_of_nodes, ranks_of_copy
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.route import ON_DRIVE, ON_HOST, kind_of
from megatron_ext.workload.state_layout import region_bytes
from megatron_ext.workload.workload import Workload


class Bill(NamedTuple):
    """The bytes that a pipeline rank holds: by kind at its peak (which may be the optimizer step), and the total on the
    device at every step of the pipeline."""

    memory: RankMemory
    step_device_bytes: tuple[int, ...]


def memory_bill(schedule: Schedule, workload: Workload) -> list[Bill]:
    """The bill of every pipeline rank. The schedule must be valid and match the workload."""
    return [_bill(schedule, workload, pp_rank) for pp_rank in range(schedule.parallel.pp)]


def keeps_device_bytes(schedule: Schedule, workload: Workload) -> bool:
    """Whether no rank holds more than the workload's ``limits.device_bytes``."""
    limit = workload.limits.device_bytes
    return limit is None or all(b.memory.device_total_bytes <= limit for b in memory_bill(schedule, workload))


def _bill(schedule: Schedule, workload: Workload, pp_rank: int) -> Bill:
    device, host, nvme_bytes = _resting(schedule, workload, pp_rank)
    device["buffers"] += buffer_bytes(schedule, workload, pp_rank)
    resting = sum(device.values())
    by_step = list(moments(schedule, workload, pp_rank))
    own = [group for group in schedule.groups if group.pp_rank == pp_rank]
    whole = 0 if schedule.zero_stage == 3 else sum(group.bytes for group in own)
    step = Moment("optimizer", whole, 0, host_slots.step_gradient_bytes(own, workload))
    peak = max(*by_step, step, key=lambda moment: moment.total)
    device |= {"whole_parameters": peak.whole, "activations": peak.activations}
    device["gradients"] += peak.gradients
    memory = rank_memory.make(device, host, nvme_bytes, peak.step)
    return Bill(memory, tuple(resting + moment.total for moment in by_step))


def host_bytes(schedule: Schedule, workload: Workload) -> list[dict[str, int]]:
    """By pipeline rank, the bytes that each of its ranks holds in host memory by the bill, by kind."""
    return [_resting(schedule, workload, pp_rank)[1] for pp_rank in range(schedule.parallel.pp)]


def _resting(schedule: Schedule, workload: Workload, pp_rank: int) -> tuple[dict[str, int], dict[str, int], int]:
    """The bytes that do not come and go with steps: by kind on the device and in host memory, and on the drive."""
    own = [group for group in schedule.groups if group.pp_rank == pp_rank]
    device, host = resting_bytes(own, workload, schedule.step_slots is not None)
    places = 1 if schedule.rollback_bytes is None else 2  # the drive holds states twice if they may be stepped early
    copies, nvme_bytes = _copies(schedule, pp_rank, places * states_on_drive_bytes(own, workload))
    on_host, device["buffers"] = host_slots.step_slots_bytes(schedule, workload, own)
    device["buffers"] += host_slots.narrow_gradient_bytes(own, workload) + host_slots.rounding_bytes(own, workload)
    copies["staging_slots"] += (
        host_slots.state_slots_bytes(schedule, workload, own) + on_host + host_slots.host_add_bytes(own, workload)
    )
    copies["previous_states"] = schedule.rollback_bytes or 0
    return device, host | copies, nvme_bytes


_OF_OPTIMIZER = ("gradients", "main_parameters", "optimizer_states")
"""What the optimizer of a rank holds, by kind. Gradients are the copies that it makes."""


def _most_of_a_rank(parallel: Parallel, held: dict[int, numpy.ndarray]) -> list[int]:
    """The bytes of the rank of a pipeline rank that holds the most.

    Args:
        held: bytes by kind and shard, by the number of ranks that share a group, which is smaller for experts.
    """
    if not held:
        return [0] * len(_OF_OPTIMIZER)
    own = numpy.arange(parallel.of_instance)
    every = numpy.sum([by_shard[:, own * ranks // len(own)] for ranks, by_shard in held.items()], axis=0)
    return every[:, every.sum(axis=0).argmax()].tolist()


def resting_bytes(
    groups: Iterable[Group], workload: Workload, step_slots: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes that a rank holds for its ``groups`` throughout the iteration: by kind on the device, and in host
    memory. With ``step_slots`` the host's optimizer keeps no copy of the gradients. The slots themselves are not
    counted."""
    settings, parallel = workload.optimizer, workload.parallel
    device, host = {"shards": 0, "gradients": 0, "gradient_shards": 0}, {"shards": 0, "gradients": 0}
    held: dict[str, dict[int, numpy.ndarray]] = {"device": {}, "host": {}}
    for group in groups:
        members, dp = members_of(group, workload), group.ranks
        if workload.zero_stage == 3:
            (host if group.shard_rests == "host" else device)["shards"] += group.bytes // dp
        whole = host_slots.gradient_bytes(group, workload)
        if group.gradients is None:
            device["gradients"] += whole
        elif group.gradients == "sharded":
            device["gradient_shards"] += whole // dp
        else:
            host["gradients"] += whole // dp
        here = settings.on_host and group.states_rest is None
        # Megatron's host optimizer copies gradients into buffers of the main parameters' dtype. For groups that it
        # steps on the device, it copies only gradients of another dtype.
        copied = settings.on_host and settings.gradient_dtype != settings.main_parameter_dtype
        copied = not step_slots if here else copied
        main_item = settings.main_item_bytes(members.dtype)
        of_element = main_item * copied, main_item, settings.state_item_bytes
        if group.states_rest == "nvme":  # a delayed update keeps all gradients of an iteration in memory
            of_element = main_item * settings.delayed, 0, 0
        own = held["host" if here or group.states_rest == "nvme" else "device"]
        own[dp] = own.get(dp, 0) + numpy.outer(of_element, _shard_numels(members.numels, dp))
    for where, place, copies in ((device, "device", "gradient_shards"), (host, "host", "gradients")):
        most = _most_of_a_rank(parallel, held[place])
        where[copies] += most[0]
        where |= dict(zip(_OF_OPTIMIZER[1:], most[1:]))
    return device, host


def buffer_bytes(schedule: Schedule, workload: Workload, pp_rank: int) -> int:
    """Bytes of the buffers on the device that gathers of a rank go through. There is one for each route and dtype, for
    experts and for other groups, as large as the largest group needs."""
    parallel, rank = schedule.parallel, schedule.ranks[pp_rank]
    most: dict[tuple[str, int, str], int] = {}
    for action in rank.unshards:
        group = schedule.groups[action.group]
        if kind_of(action.route).shard_from_host:
            size = kind_of(action.route).buffer_bytes(group.bytes, group.ranks)
        elif group.algorithm_by(action.route) is not None:
            size = group.bytes + group.bytes // group.ranks * nodes_spanned(parallel, pp_rank, group.ranks)
        else:
            continue
        key = action.route, group.ranks, members_of(group, workload).dtype
        most[key] = max(most.get(key, 0), size)
    return sum(most.values())


def check_run(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse a run that holds more than the schedule's ``limits.device_bytes``.

    Args:
        workload: the run's, with its own optimizer settings. The bytes of whole parameters, whole gradients, buffers
            and activations are taken from the schedule's prediction.

    Raises:
        InputError: with the bytes that are missing.
    """
    limit = schedule.limits.device_bytes
    if limit is None or schedule.predicted is None:
        return
    for pp_rank, planned in enumerate(schedule.predicted.memory):
        device, _ = resting_bytes([group for group in schedule.groups if group.pp_rank == pp_rank], workload)
        kinds = ("whole_parameters", "activations", "gradients", "buffers")
        moving = sum(planned.device_bytes.get(kind, 0) for kind in kinds)
        need = sum(device.values()) - device["gradients"] + moving
        if need > limit:
            said = f"pipeline rank {pp_rank} holds up to {need} bytes with this run's optimizer"
            Checker(file).refuse(f"{said}, {need - limit} bytes short", "limits.device_bytes", limit)


def short_of_whole(schedule: Schedule, pp_rank: int) -> int:
    """Bytes that are missing for all parameters of a pipeline rank to be whole at once, next to everything else that it
    holds at its peak, within ``limits.device_bytes``; 0 if they fit."""
    limit, predicted = schedule.limits.device_bytes, schedule.predicted
    if schedule.zero_stage < 3 or limit is None or predicted is None or not predicted.memory:
        return 0
    planned = predicted.memory[pp_rank]
    whole = sum(group.bytes for group in schedule.groups if group.pp_rank == pp_rank)
    return max(planned.device_total_bytes - planned.device_bytes.get("whole_parameters", 0) + whole - limit, 0)


def never_whole(schedule: Schedule) -> int:
    """The largest :func:`short_of_whole` of all pipeline ranks; 0 if on every rank all parameters may be whole."""
    return max(short_of_whole(schedule, pp_rank) for pp_rank in range(schedule.parallel.pp))


def copies_of_whole(schedule: Schedule) -> list[int]:
    """By pipeline rank, the bytes of host memory that each of its ranks takes for copies of its parameters while it
    builds, loads or saves them: all parameters if they do not fit whole onto the device, else 0."""
    whole = lambda pp_rank: sum(group.bytes for group in schedule.groups if group.pp_rank == pp_rank)
    return [whole(pp_rank) if short_of_whole(schedule, pp_rank) else 0 for pp_rank in range(schedule.parallel.pp)]


def on_nodes(workload: Workload, of_ranks: list[int]) -> list[int]:
    """By node, the sum over its ranks. ``of_ranks``: by pipeline rank, the bytes of each of its ranks."""
    return pinned_bytes_of_nodes(workload.parallel, {}, of_ranks)


def host_bytes_of_nodes(schedule: Schedule, workload: Workload) -> list[int]:
    """By node, the bytes of host memory that its ranks hold by the memory bill."""
    return on_nodes(workload, [sum(kinds.values()) for kinds in host_bytes(schedule, workload)])


def host_bytes_taken(
    schedule: Schedule, workload: Workload, held: Sequence[tuple[int, int]], saved: bool = False
) -> list[int]:
    """By node, the bytes of host memory that a run will still take: what its ranks hold by the memory bill after the
    first iteration, less what they hold now. ``saved``: the run saves checkpoints, which takes copies of parameters
    that do not fit whole onto the device.

    Args:
        held: by rank, (bytes in host memory that stay, these plus the bytes that the first iteration frees).
    """
    ranks, copies = schedule.parallel.node_size, copies_of_whole(schedule) if saved else [0] * schedule.parallel.pp
    now = [map(sum, zip(*held[first : first + ranks])) for first in range(0, len(held), ranks)]
    nodes = zip(host_bytes_of_nodes(schedule, workload), on_nodes(workload, copies), now)
    return [max(size - stays, size + copied - at_first, 0) for size, copied, (stays, at_first) in nodes]


@lru_cache(maxsize=4096)
def _shard_numels(numels: tuple[int, ...], ranks: int) -> numpy.ndarray:
    """For each shard, its elements of parameters, without padding."""
    return numpy.array([sum(parts) for parts in shard_parts(numels, ranks)])


@lru_cache(maxsize=4096)
def _shard_regions(numels: tuple[int, ...], ranks: int, moments: int) -> numpy.ndarray:
    """For each shard, the bytes of the regions of its parameters on the drive, as an array of one row."""
    return numpy.array([[sum(region_bytes(part, moments) for part in parts) for parts in shard_parts(numels, ranks)]])


def states_on_drive_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Bytes of optimizer states of a rank's ``groups`` on the drive."""
    held: dict[int, numpy.ndarray] = {}
    for group in groups:
        if group.states_rest == "nvme":
            moments = len(workload.optimizer.moment_dtypes)
            regions = _shard_regions(members_of(group, workload).numels, group.ranks, moments)
            held[group.ranks] = held.get(group.ranks, 0) + regions
    return _most_of_a_rank(workload.parallel, held)[0]


def _copies(schedule: Schedule, pp_rank: int, states_on_drive: int) -> tuple[dict[str, int], int]:
    """One rank's part of the node's host copies, its staging slots, and its part of the bytes on the drive."""
    parallel, bounced = schedule.parallel, 0
    copies = {where: dict.fromkeys((parallel.dp, parallel.expert_dp), 0) for where in (ON_HOST, ON_DRIVE)}
    for entry in schedule.publish:
        group = schedule.groups[entry.group]
        if group.pp_rank == pp_rank:
            for destination in entry.to:
                copies[destination][group.ranks] += group.bytes
            bounced = max(bounced, 0 if ON_HOST in entry.to else bounce_bytes(group, parallel))
    slots = slot_bytes(schedule, pp_rank) * schedule.limits.nvme_slots + bounced
    own = {
        where: sum(size // ranks_of_copy(parallel, pp_rank, ranks) for ranks, size in sizes.items())
        for where, sizes in copies.items()
    }
    return {"host_copies": own[ON_HOST], "staging_slots": slots}, own[ON_DRIVE] + states_on_drive
