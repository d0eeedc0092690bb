"""The memory bill: what every rank holds by a schedule, by kind, at its peak and by step.

[Note: What is counted]
* Whole parameters from the issue of an unshard to the reshard. Zero stage 1: all of them, always.
* Shards with storage of their own (zero stage 3), on the device or in host memory as the schedule says. At zero
  stage 1 a shard is a view of the whole group.
* Gradients with Megatron's padding: whole throughout the iteration; or the shard throughout, and the whole gradient
  from just before the backward of the group's last layer until the rank issues its next reduce, which waits for this
  one; where a gradient is allocated ``alone``, until then. With ``reduce_every`` above 1 the whole gradient stays
  through several backward steps.
* Buffers that hierarchical and symmetric all-gathers and pieces of ``cpu_shard`` go through, as large as the largest
  group needs.
* The optimizer's copies of 16-bit parameters, its states and the parameters of a delayed update, for the elements of
  the rank's shards without padding. Of the data-parallel ranks the one that holds most is billed.
* Slots of states on the drive, with room for gradients. All other gradients pass to the host's optimizer through
  ``step_slots``; where the schedule has none, Megatron copies them to memory that it keeps. Of groups that it steps on
  the device it keeps fp32 copies of gradients there where gradients have 16 bits.
* Activations: what autograd saves in each layer, from the layer's forward to its backward, for every micro-batch in
  flight, and what the backward in progress recomputes.

Not counted: what a layer's kernels allocate and free again within the layer, ``parameter.grad`` until it is added to
the gradient buffer, messages between stages that no layer has saved, and what communication libraries allocate.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.formats import rank_memory
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.schedule.footprint import slot_bytes
from megatron_ext.schedule.group_uses import uses_of_groups
from megatron_ext.schedule.step_slots import largest_gradient, step_slots_bytes
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.workload.bucket_layout import ITEM_BYTES, shard_numels, shard_parts
from megatron_ext.workload.nodes import nodes_spanned, ranks_of_copy
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.route import piece_buffer_bytes
from megatron_ext.workload.state_layout import GRADIENT_SLOTS, ROUNDING_BYTES, gradient_slot_bytes, region_bytes
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Limits, Workload


class Bill(NamedTuple):
    """What a pipeline rank holds: by kind at its peak, and on the device in all at every step."""

    memory: RankMemory
    step_device_bytes: tuple[int, ...]


class _Moment(NamedTuple):
    """Bytes by kind at the moment of a step at which their sum is largest."""

    step: str
    whole: int
    activations: int
    gradients: int

    @property
    def total(self) -> int:
        return self.whole + self.activations + self.gradients


def memory_bill(schedule: Schedule, workload: Workload) -> list[Bill]:
    """The bill of every pipeline rank. The schedule must be valid and match the workload."""
    return [_bill(schedule, workload, pp_rank) for pp_rank in range(schedule.parallel.pp)]


def _bill(schedule: Schedule, workload: Workload, pp_rank: int) -> Bill:
    device, host, nvme_bytes = _resting(schedule, workload, pp_rank)
    device["buffers"] += buffer_bytes(schedule, workload, pp_rank)
    resting = sum(device.values())
    moments = list(_moments(schedule, workload, pp_rank))
    peak = max(moments, key=lambda moment: moment.total)
    device |= {"whole_parameters": peak.whole, "activations": peak.activations}
    device["gradients"] += peak.gradients
    return Bill(
        rank_memory.make(device, host, nvme_bytes, peak.step), tuple(resting + moment.total for moment in moments)
    )


def host_bytes(schedule: Schedule, workload: Workload) -> list[dict[str, int]]:
    """What each rank of every pipeline rank holds in host memory by the bill, by kind."""
    return [_resting(schedule, workload, pp_rank)[1] for pp_rank in range(schedule.parallel.pp)]


def _resting(schedule: Schedule, workload: Workload, pp_rank: int) -> tuple[dict[str, int], dict[str, int], int]:
    """By kind on the device and in host memory, and on the drive: what does not come and go with steps."""
    own = [group for group in schedule.groups if group.pp_rank == pp_rank]
    device, host = resting_bytes(own, workload, schedule.step_slots is not None)
    places = 1 if schedule.rollback_bytes is None else 2  # of each unit that may be stepped early
    copies, nvme_bytes = _copies(schedule, pp_rank, places * states_on_drive_bytes(own, workload))
    on_host, device["buffers"] = step_slots_bytes(schedule, workload, own)
    device["buffers"] += narrow_gradient_bytes(own, workload) + rounding_bytes(own, workload)
    copies["staging_slots"] += state_slots_bytes(schedule, workload, own) + on_host + host_add_bytes(own, workload)
    copies["previous_states"] = schedule.rollback_bytes or 0
    return device, host | copies, nvme_bytes


class _Held(NamedTuple):
    """Of the optimizer, by rank: gradients that it copies, main parameters and states, on the device and in host
    memory; and what follows a delayed update."""

    on_device: tuple[list[int], ...]
    on_host: tuple[list[int], ...]
    following: list[int]

    @classmethod
    def of_ranks(cls, ranks: int) -> "_Held":
        on_device, on_host = (tuple([0] * ranks for _ in range(3)) for _ in range(2))
        return cls(on_device, on_host, [0] * ranks)


def _of_every_rank(parallel: Parallel, held: dict[int, _Held]) -> _Held:
    """By rank of a pipeline rank, what it holds of dense groups and of experts; of ranks that hold alike, one."""
    if len(held) == 1:
        return held[parallel.dp]
    of_stage = parallel.world_size // parallel.pp
    places = dict.fromkeys(tuple(rank * ranks // of_stage for ranks in held) for rank in range(of_stage))

    def summed(*by_rank: list[int]) -> list[int]:
        return [sum(values[index] for values, index in zip(by_rank, place)) for place in places]

    kinds = list(held.values())
    on_device, on_host = (tuple(map(summed, *(kind[where] for kind in kinds))) for where in (0, 1))
    return _Held(on_device, on_host, summed(*(kind.following for kind in kinds)))


def resting_bytes(
    groups: Iterable[Group], workload: Workload, step_slots: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """What a rank holds of its ``groups`` throughout the iteration: by kind on the device, and in host memory. With
    ``step_slots`` the host's optimizer keeps no copy of the gradients; the slots themselves are not counted."""
    settings, parallel = workload.optimizer, workload.parallel
    device, host = {"shards": 0, "gradients": 0, "gradient_shards": 0}, {"shards": 0, "gradients": 0}
    held = {ranks: _Held.of_ranks(ranks) for ranks in (parallel.dp, parallel.expert_dp)}
    for group in groups:
        dtype, numels = members_of(workload, group)
        dp, (on_device, on_host, following) = group.ranks, held[group.ranks]
        if workload.zero_stage == 3:
            (host if group.shard_rests == "host" else device)["shards"] += group.bytes // dp
        whole = gradient_bytes(group, workload)
        if group.gradients is None:
            device["gradients"] += whole
        elif group.gradients == "sharded":
            device["gradient_shards"] += whole // dp
        else:
            host["gradients"] += whole // dp
        here = settings.on_host and group.states_rest is None
        gradients, main, states = on_host if here else on_device
        # Megatron's host optimizer copies gradients into buffers of the main parameters' dtype. Of what it steps on the
        # device it copies those of another dtype.
        copied = settings.on_host and settings.gradient_dtype != settings.main_parameter_dtype
        copied = not step_slots if here else copied
        for rank, numel in enumerate(_shard_numels(numels, dp)):
            following[rank] += numel * ITEM_BYTES[dtype]
            if group.states_rest != "nvme":
                main[rank] += numel * settings.main_item_bytes(dtype)
                states[rank] += numel * settings.state_item_bytes
                gradients[rank] += numel * settings.main_item_bytes(dtype) if copied else 0
            elif settings.delayed:  # Megatron copies all gradients
                on_host[0][rank] += numel * settings.main_item_bytes(dtype)
    every = _of_every_rank(parallel, held)
    for where, optimizer, kind in ((device, every.on_device, "gradient_shards"), (host, every.on_host, "gradients")):
        gradients, main, states = max(zip(*optimizer), key=sum)
        where |= {"main_parameters": main, "optimizer_states": states}
        where[kind] += gradients
    if settings.delayed:
        host["next_parameters"] = max(every.following)
    return device, host


def gradient_bytes(group: Group, workload: Workload) -> int:
    """Bytes of the whole gradient of ``group``, with Megatron's padding."""
    parameters = workload.chunk(group.pp_rank, group.model_chunk_id).parameters
    dtype = next(p.dtype for p in parameters if p.name == group.parameters[0])
    return group.bytes // ITEM_BYTES[dtype] * workload.optimizer.gradient_item_bytes


def buffer_bytes(schedule: Schedule, workload: Workload, pp_rank: int) -> int:
    """Bytes on the device that gathers of a rank go through: for each dtype, of experts and of
    all else, as large as the largest group needs."""
    parallel, rank = schedule.parallel, schedule.ranks[pp_rank]
    most: dict[tuple[str, int, str], int] = {}
    for entry in (rank.start, *rank.steps):
        for action in entry.unshard:
            group = schedule.groups[action.group]
            if action.route == "cpu_shard":
                size = piece_buffer_bytes(group.bytes)
            elif action.route == "gpu" and group.algorithm is not None:
                size = group.bytes + group.bytes // group.ranks * nodes_spanned(parallel, pp_rank, group.ranks)
            else:
                continue
            parameters = workload.chunk(pp_rank, group.model_chunk_id).parameters
            key = (action.route, group.ranks, next(p.dtype for p in parameters if p.name == group.parameters[0]))
            most[key] = max(most.get(key, 0), size)
    return sum(most.values())


def activation_peaks(workload: Workload) -> list[int]:
    """The most bytes of activations of every pipeline rank, whatever the schedule."""
    return list(_activation_peaks(replace(workload, limits=Limits())))  # a search tries many limits


@lru_cache(maxsize=4)
def _activation_peaks(workload: Workload) -> tuple[int, ...]:
    return tuple(max(max(saved) for *_, saved in activations(workload, rank)) for rank in range(workload.parallel.pp))


def activations(workload: Workload, pp_rank: int) -> Iterator[tuple[int, bool, list[int]]]:
    """By step of a pipeline rank: its chunk, whether it is a backward, and by layer the bytes of activations that are
    there while the layer computes."""
    sums = [_sums_of(chunk) for chunk in workload.chunks_of_rank(pp_rank)]
    in_flight = 0  # saved by micro-batches that have done their forward and not begun their backward
    for step in steps_of_ranks(workload.parallel)[pp_rank]:
        chunk, backward = step.model_chunk_id(workload.parallel.pp), step.kind == "B"
        own = sums[chunk][0][-1]
        in_flight -= own if backward else 0
        yield chunk, backward, [in_flight + size for size in sums[chunk][backward]]
        in_flight += 0 if backward else own


def check_run(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse a run that holds more than the schedule's ``limits.device_bytes``.

    Args:
        workload: the run's, with its own optimizer settings. Whole parameters, whole gradients, buffers and activations
            are the schedule's prediction.

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
            raise InputError(
                f"pipeline rank {pp_rank} holds up to {need} bytes with this run's optimizer, "
                f"{need - limit} bytes short",
                file=file,
                field="limits.device_bytes",
                value=limit,
            )


def short_of_whole(schedule: Schedule, pp_rank: int) -> int:
    """Bytes that ``limits.device_bytes`` is short of all parameters of a pipeline rank being whole beside everything
    else that it holds at its peak; 0: they may be."""
    limit, predicted = schedule.limits.device_bytes, schedule.predicted
    if schedule.zero_stage < 3 or limit is None or predicted is None or not predicted.memory:
        return 0
    planned = predicted.memory[pp_rank]
    whole = sum(group.bytes for group in schedule.groups if group.pp_rank == pp_rank)
    return max(planned.device_total_bytes - planned.device_bytes.get("whole_parameters", 0) + whole - limit, 0)


def never_whole(schedule: Schedule) -> int:
    """The most bytes by :func:`short_of_whole` of a pipeline rank; 0: all parameters of each may be whole."""
    return max(short_of_whole(schedule, pp_rank) for pp_rank in range(schedule.parallel.pp))


def copies_of_whole(schedule: Schedule) -> list[int]:
    """Bytes of host memory that each rank of every pipeline rank takes for copies of its parameters while it builds,
    loads or saves them: all, where they never fit whole onto the device, else 0."""
    own = [0] * schedule.parallel.pp
    for group in schedule.groups:
        own[group.pp_rank] += group.bytes
    return [size if short_of_whole(schedule, pp_rank) else 0 for pp_rank, size in enumerate(own)]


_shard_numels = lru_cache(maxsize=4096)(shard_numels)
_shard_parts = lru_cache(maxsize=4096)(shard_parts)


def members_of(workload: Workload, group: Group) -> tuple[str, tuple[int, ...]]:
    """Dtype and elements of a group's parameters."""
    names = set(group.parameters)
    members = [p for p in workload.chunk(group.pp_rank, group.model_chunk_id).parameters if p.name in names]
    return members[0].dtype, tuple(p.numel for p in members)


def states_on_drive_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """What the drive holds of the optimizer states of a rank's ``groups``."""
    moments, parallel = len(workload.optimizer.moment_dtypes), workload.parallel
    held = {ranks: _Held.of_ranks(ranks) for ranks in (parallel.dp, parallel.expert_dp)}
    for group in groups:
        if group.states_rest == "nvme":
            for rank, parts in enumerate(_shard_parts(members_of(workload, group)[1], group.ranks)):
                held[group.ranks].following[rank] += sum(region_bytes(numel, moments) for numel in parts)
    return max(_of_every_rank(parallel, held).following)


def state_slots_bytes(schedule: Schedule, workload: Workload, groups: list[Group]) -> int:
    """Of the slots through which states on the drive pass on a rank with ``groups``, and of the rooms beside them,
    through which gradients arrive and parameters leave."""
    slots, on_drive = schedule.state_slots, [group for group in groups if group.states_rest == "nvme"]
    if slots is None or not on_drive:
        return 0
    settings = workload.optimizer
    room = 0 if settings.delayed else gradient_slot_bytes(slots.slot_bytes, len(settings.moment_dtypes))
    return slots.slots * (slots.slot_bytes + room)


def host_add_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Of the slots through which gradients reach their sums in host memory, on a rank with ``groups``."""
    shards = [gradient_bytes(g, workload) // g.ranks for g in groups if g.gradients == "host"]
    return GRADIENT_SLOTS * max(shards, default=0)


def narrow_gradient_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Of the buffer on the device in which 16-bit gradients become fp32 where the states rest on the drive."""
    if workload.optimizer.delayed or workload.optimizer.gradient_dtype == "float32":
        return 0
    return max((largest_gradient(group, workload) for group in groups if group.states_rest == "nvme"), default=0)


def rounding_bytes(groups: Iterable[Group], workload: Workload) -> int:
    """Of the buffer on the device through which an optimizer that steps there writes shards in host memory."""
    if workload.optimizer.on_host:
        return 0
    fp32 = [largest_gradient(group, workload) for group in groups if group.shard_rests == "host"]
    return min(max(fp32, default=0) // 2, ROUNDING_BYTES)


def _copies(schedule: Schedule, pp_rank: int, states_on_drive: int) -> tuple[dict[str, int], int]:
    """This rank's part of the node's host copies and staging slots, and of the copies on the drive."""
    parallel = schedule.parallel
    copies = {where: dict.fromkeys((parallel.dp, parallel.expert_dp), 0) for where in ("cpu", "nvme")}
    for entry in schedule.publish:
        group = schedule.groups[entry.group]
        if group.pp_rank == pp_rank:
            for destination in entry.to:
                copies[destination][group.ranks] += group.bytes
    slots = slot_bytes(schedule, pp_rank) * schedule.limits.nvme_slots
    own = {
        where: sum(size // ranks_of_copy(parallel, pp_rank, ranks) for ranks, size in sizes.items())
        for where, sizes in copies.items()
    }
    return {"host_copies": own["cpu"], "staging_slots": slots}, own["nvme"] + states_on_drive


def _moments(schedule: Schedule, workload: Workload, pp_rank: int) -> Iterator[_Moment]:
    """The largest moment of every step, in order."""
    groups, rank = schedule.groups, schedule.ranks[pp_rank]
    freed = schedule.zero_stage == 3
    gradients = _Gradients(schedule, workload, pp_rank)
    whole = sum(groups[a.group].bytes for a in rank.start.unshard)
    if not freed:
        whole = sum(group.bytes for group in groups if group.pp_rank == pp_rank)
    for entry, (chunk, backward, by_layer) in zip(rank.steps, activations(workload, pp_rank)):
        best = _Moment(entry.step, 0, 0, 0)
        if backward:
            gradients.begin(chunk)
        for layer, saved in reversed(list(enumerate(by_layer))) if backward else enumerate(by_layer):
            if freed:
                first = layer == (len(by_layer) - 1 if backward else 0)
                whole += sum(groups[a.group].bytes for a in entry.unshard if a.at == layer or (first and a.at < 0))
            if backward:
                gradients.before(chunk, layer)
            best = max(best, _Moment(entry.step, whole, saved, gradients.bytes), key=lambda m: m.total)
            if backward:
                gradients.behind(chunk, layer)
            if freed and entry.reshard:
                whole -= sum(groups[a.group].bytes for a in entry.reshard if a.at == layer)
        if freed:
            whole -= sum(groups[a.group].bytes for a in entry.reshard if a.at < 0)
        yield best


class _Gradients:
    """Whole gradients of one rank that come and go. ``bytes``: those that are there."""

    def __init__(self, schedule: Schedule, workload: Workload, pp_rank: int):
        self.bytes = 0
        self._on_its_way: tuple[int, int] | None = None  # group and bytes
        self._visits = [0] * schedule.parallel.vp
        self._last = schedule.parallel.num_microbatches
        spans = uses_of_groups(schedule.groups, workload) if any(g.gradients for g in schedule.groups) else []
        self._allocated: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = {}
        self._reduced: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for index, (group, (first, last)) in enumerate(zip(schedule.groups, spans)):
            if group.pp_rank == pp_rank and group.gradients is not None:
                item = index, gradient_bytes(group, workload), group.reduce_every
                self._allocated.setdefault((group.model_chunk_id, last), []).append((*item, group.alone))
                self._reduced.setdefault((group.model_chunk_id, first), []).append(item)

    def begin(self, chunk: int) -> None:
        """A backward step of ``chunk`` begins."""
        self._visits[chunk] += 1

    def before(self, chunk: int, layer: int) -> None:
        """Allocate what the backward of ``layer`` is the first to add to."""
        for index, size, every, alone in self._allocated.get((chunk, layer), ()):
            if (self._visits[chunk] - 1) % every == 0:
                if alone or (self._on_its_way is not None and self._on_its_way[0] == index):
                    self._settle()  # the group's own of the visit before, or whichever it is
                self.bytes += size

    def behind(self, chunk: int, layer: int) -> None:
        """Issue the reduces that are due behind the backward of ``layer``; the one before has ended and is freed."""
        visit = self._visits[chunk]
        for index, size, every in self._reduced.get((chunk, layer), ()):
            if visit % every == 0 or visit == self._last:
                self._settle()
                self._on_its_way = index, size

    def _settle(self) -> None:
        if self._on_its_way is not None:
            self.bytes -= self._on_its_way[1]
            self._on_its_way = None


def _sums_of(chunk: Chunk) -> tuple[list[int], list[int]]:
    """For every layer: what is saved of one micro-batch up to and with it, and that with what its backward recomputes.

    Megatron recomputes within its transformer block alone. What the output layer saves is freed before the block's
    backward recomputes anything.
    """
    saved = list(accumulate(chunk.activation_bytes or (0,) * chunk.num_layers))
    kinds = chunk.layer_kinds or ("transformer",) * len(saved)
    recomputed = (0 if kind in ("embedding", "output") else chunk.recompute_bytes for kind in kinds)
    return saved, [own + anew for own, anew in zip(saved, recomputed, strict=True)]
