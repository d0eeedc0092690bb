"""The memory bill: what every rank holds by a schedule, by kind, at its peak and by step.

[Note: What is counted]
* Whole parameters from the issue of an unshard to the reshard. Zero stage 1: all of them, always.
* Shards with storage of their own (zero stage 3), on the device or in host memory as the schedule says. At zero
  stage 1 a shard is a view of the whole group.
* Gradient buffers, whole, with Megatron's padding.
* The optimizer's copies of 16-bit parameters and its states, for the elements of the rank's shards without padding. Of
  the data-parallel ranks the one that holds most is billed.
* Activations: what autograd saves in each layer, from the layer's forward to its backward, for every micro-batch
  in flight,
  and what the backward in progress recomputes.

Not counted: what a layer's kernels allocate and free again within the layer, ``parameter.grad`` until it is added
to the
gradient buffer, messages between stages that no layer has saved, and what communication libraries allocate.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from megatron_ext.formats import rank_memory
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.schedule.footprint import slot_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.workload.bucket_layout import ITEM_BYTES, shard_numels
from megatron_ext.workload.state_layout import region_bytes
from megatron_ext.workload.step import Step
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Workload


class Bill(NamedTuple):
    """What a pipeline rank holds: by kind at its peak, and on the device in all at every step."""

    memory: RankMemory
    step_device_bytes: tuple[int, ...]


class _Moment(NamedTuple):
    """Bytes that come and go, when their sum is largest within a step."""

    step: str
    whole: int
    activations: int


def memory_bill(schedule: Schedule, workload: Workload) -> list[Bill]:
    """The bill of every pipeline rank. The schedule must be valid and match the workload."""
    return [_bill(schedule, workload, pp_rank) for pp_rank in range(schedule.parallel.pp)]


def _bill(schedule: Schedule, workload: Workload, pp_rank: int) -> Bill:
    own = [group for group in schedule.groups if group.pp_rank == pp_rank]
    device, host = resting_bytes(own, workload)
    copies, nvme_bytes = _copies(schedule, pp_rank, states_on_drive_bytes(own, workload))
    resting = sum(device.values())
    moments = list(_moments(schedule, workload, pp_rank))
    peak = max(moments, key=lambda moment: moment.whole + moment.activations)
    device |= {"whole_parameters": peak.whole, "activations": peak.activations}
    return Bill(
        rank_memory.make(device, host | copies, nvme_bytes, peak.step),
        tuple(resting + moment.whole + moment.activations for moment in moments),
    )


def resting_bytes(groups: Iterable[Group], workload: Workload) -> tuple[dict[str, int], dict[str, int]]:
    """What a rank holds of its ``groups`` throughout the iteration: by kind on the device, and in host memory."""
    settings, dp = workload.optimizer, workload.parallel.dp
    device, host = {"shards": 0, "gradients": 0}, {"shards": 0}
    main, states = [0] * dp, [0] * dp
    gradients = [0] * dp  # of the host optimizer
    for group in groups:
        dtype, numels = _members(workload, group)
        if workload.zero_stage == 3:
            (host if group.shard_rests == "host" else device)["shards"] += group.bytes // dp
        device["gradients"] += group.bytes // ITEM_BYTES[dtype] * settings.gradient_item_bytes
        for rank, numel in enumerate(_shard_numels(numels, dp)):
            gradients[rank] += numel * settings.main_item_bytes(dtype)
            if group.states_rest is None:
                main[rank] += numel * settings.main_item_bytes(dtype)
                states[rank] += numel * settings.state_item_bytes
    most = max(range(dp), key=lambda rank: main[rank] + states[rank] + gradients[rank])
    held = host if settings.on_host else device
    held |= {"main_parameters": main[most], "optimizer_states": states[most]}
    if settings.on_host:  # Megatron's host optimizer copies gradients into buffers of the main parameters' dtype
        host["gradients"] = gradients[most]
    return device, host


def activation_peaks(workload: Workload) -> list[int]:
    """The most bytes of activations of every pipeline rank, whatever the schedule."""
    peaks = []
    for pp_rank, steps in enumerate(steps_of_ranks(workload.parallel)):
        sums = [_sums_of(chunk) for chunk in workload.chunks_of_rank(pp_rank)]
        in_flight = peak = 0
        for step in steps:
            own, recomputed = sums[step.model_chunk_id(workload.parallel.pp)]
            in_flight += own[-1] if step.kind == "F" else 0
            peak = max(peak, in_flight + (recomputed if step.kind == "B" else 0))
            in_flight -= own[-1] if step.kind == "B" else 0
        peaks.append(peak)
    return peaks


def check_run(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse a run that holds more than the schedule's ``limits.device_bytes``.

    Args:
        workload: the run's, with its own optimizer settings. Whole parameters and activations are the schedule's
        prediction.

    Raises:
        InputError: with the bytes that are missing.
    """
    limit = schedule.limits.device_bytes
    if limit is None or schedule.predicted is None:
        return
    for pp_rank, planned in enumerate(schedule.predicted.memory):
        device, _ = resting_bytes([group for group in schedule.groups if group.pp_rank == pp_rank], workload)
        moving = sum(planned.device_bytes.get(kind, 0) for kind in ("whole_parameters", "activations"))
        need = sum(device.values()) + moving
        if need > limit:
            raise InputError(
                f"pipeline rank {pp_rank} holds up to {need} bytes with this run's optimizer, "
                f"{need - limit} bytes short",
                file=file,
                field="limits.device_bytes",
                value=limit,
            )


_shard_numels = lru_cache(maxsize=4096)(shard_numels)


def _members(workload: Workload, group: Group) -> tuple[str, tuple[int, ...]]:
    """Dtype and elements of a group's parameters."""
    names = set(group.parameters)
    members = [p for p in workload.chunk(group.pp_rank, group.model_chunk_id).parameters if p.name in names]
    return members[0].dtype, tuple(p.numel for p in members)


def states_on_drive_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """What the drive holds of the optimizer states of a rank's ``groups``."""
    moments, dp = len(workload.optimizer.moment_dtypes), workload.parallel.dp
    held = [0] * dp
    for group in groups:
        if group.states_rest == "nvme":
            for rank, numel in enumerate(_shard_numels(_members(workload, group)[1], dp)):
                held[rank] += region_bytes(numel, moments)
    return max(held)


def _copies(schedule: Schedule, pp_rank: int, states_on_drive: int) -> tuple[dict[str, int], int]:
    """This rank's part of the node's host copies and staging slots, and of the copies on the drive."""
    parallel = schedule.parallel
    nodes = [parallel.node_of(pp_rank, dp_rank) for dp_rank in range(parallel.dp)]
    sharing = min(nodes.count(node) for node in set(nodes))
    copies = dict.fromkeys(("cpu", "nvme"), 0)
    for entry in schedule.publish:
        group = schedule.groups[entry.group]
        if group.pp_rank == pp_rank:
            for destination in entry.to:
                copies[destination] += group.bytes
    slots = slot_bytes(schedule, pp_rank) * schedule.limits.nvme_slots
    if schedule.state_slots is not None and states_on_drive:
        slots += schedule.state_slots.slots * schedule.state_slots.slot_bytes
    return {"host_copies": copies["cpu"] // sharing, "staging_slots": slots}, copies[
        "nvme"
    ] // sharing + states_on_drive


def _moments(schedule: Schedule, workload: Workload, pp_rank: int) -> Iterator[_Moment]:
    """The largest moment of every step, in order."""
    pp, groups, rank = schedule.parallel.pp, schedule.groups, schedule.ranks[pp_rank]
    freed = schedule.zero_stage == 3
    sums = [_sums_of(chunk) for chunk in workload.chunks_of_rank(pp_rank)]
    whole = sum(groups[a.group].bytes for a in rank.start.unshard)
    if not freed:
        whole = sum(group.bytes for group in groups if group.pp_rank == pp_rank)
    in_flight = 0  # saved by micro-batches that have done their forward and not begun their backward
    for entry in rank.steps:
        step = Step.parse(entry.step)
        own, recomputed = sums[step.model_chunk_id(pp)]
        in_flight -= own[-1] if step.kind == "B" else 0
        best = (0, 0)
        for layer, saved in enumerate(own) if step.kind == "F" else reversed(list(enumerate(own))):
            if freed:
                first = layer == (0 if step.kind == "F" else len(own) - 1)
                whole += sum(groups[a.group].bytes for a in entry.unshard if a.at == layer or (first and a.at < 0))
            activations = in_flight + saved + (recomputed if step.kind == "B" else 0)
            best = max(best, (whole, activations), key=sum)
            if freed and entry.reshard:
                whole -= sum(groups[a.group].bytes for a in entry.reshard if a.at == layer)
        if freed:
            whole -= sum(groups[a.group].bytes for a in entry.reshard if a.at < 0)
        in_flight += own[-1] if step.kind == "F" else 0
        yield _Moment(entry.step, *best)


def _sums_of(chunk: Chunk) -> tuple[list[int], int]:
    """What is saved of one micro-batch up to and with every layer, and what its backward recomputes."""
    return list(accumulate(chunk.activation_bytes or (0,) * chunk.num_layers)), chunk.recompute_bytes
