"""A schedule as the engine runs it: every step is a short list of operations with durations.

Operations are tuples whose first item is one of RUN, WAIT, ISSUE, STAGE, REDUCE_GROUP, REDUCE_VISIT, SETTLE. A step is
cut at every layer at which a group is needed, an action is placed, gradients become complete, or a gradient is
allocated alone. The layers between two cuts run as one operation.
"""

from collections.abc import Sequence

from megatron_ext.schedule.group_facts import gradient_bytes, uses_of_groups
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.activity_kinds import CPU, GPU, NVME
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import RouteKind, kind_of, shard_pieces
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload

RUN, WAIT, ISSUE, STAGE, REDUCE_GROUP, REDUCE_VISIT, SETTLE = range(7)
"""``(RUN, us)``; ``(WAIT, gather)``; ``(ISSUE, gather)``; ``(STAGE, group,
slot, bytes, us)``; ``(REDUCE_GROUP, group, bytes, us, None)``; ``(REDUCE_VISIT, group, bytes, us, to_host)``, where
``to_host`` is None or (bytes as of a dense group, us of the copy to host memory, us of the addition there);
``(SETTLE,)`` waits for the last of these reduces."""


class Gather:
    """One unshard of one group: the engine's unit of work on a link.

    ``flat``: it is one all-gather over the communicator over which the group's gradients are reduced as well.
    ``shard_bytes`` and ``shard_us``: the copies of ``cpu_shard``. The first of its ``pieces`` is copied before anything
    is gathered, and the last is gathered when everything is copied. ``copied`` and ``gathered``: the number of legs
    over each link that have ended.
    """

    def __init__(self, group: int, route: int, size: int, us: float, call_us: float, slot: int, flat: bool):
        self.group, self.route, self.bytes = group, route, size
        self.us, self.call_us, self.slot, self.flat = us, call_us, slot, flat
        self.shard_bytes, self.shard_us = 0, 0.0
        self.pieces, self.copied, self.gathered = 1, 0, 0
        self.issued_us = self.start_us = self.end_us = -1.0
        self.done = False


class RankProgram:
    """What one pipeline rank does in one iteration.

    ``start`` are operations before the first step; ``steps[i]`` is ``(stage, backward,
    microbatch, operations)``; ``gathers`` are all unshards in issue order; ``experts`` are groups whose collectives
    have a communicator of their own.
    """

    def __init__(self, pp_rank: int, experts: frozenset[int] = frozenset()):
        self.pp_rank, self.experts = pp_rank, experts
        self.start: list[tuple] = []
        self.steps: list[tuple] = []
        self.gathers: list[Gather] = []


def rank_programs(schedule: Schedule, workload: Workload, timing: Timing) -> list[RankProgram]:
    """Programs of all pipeline ranks. The schedule must be valid and match the workload."""
    spans = uses_of_groups(schedule.groups, workload)
    expected = steps_of_ranks(workload.parallel)
    return [_program_of(schedule, workload, timing, spans, rank, steps) for rank, steps in enumerate(expected)]


SHARD = -1
"""Used in place of a link's kind for a gather by ``cpu_shard``, which uses two links one after the other."""


def _link_of(kind: RouteKind) -> int:
    if kind.shard_from_host:
        return SHARD
    if kind.staged:
        return NVME
    return CPU if kind.copy else GPU


def _program_of(schedule, workload, timing, spans, pp_rank, steps) -> RankProgram:
    dp = workload.parallel.dp
    program = RankProgram(pp_rank, frozenset(n for n, group in enumerate(schedule.groups) if group.ranks != dp))
    groups, gathers, pp = schedule.groups, program.gathers, workload.parallel.pp
    waits: dict[int, list[tuple[int, int]]] = {}  # step index -> (group, gather)
    slot_of: dict[int, int] = {}

    def gather(action, index: int) -> tuple:
        size, algorithm, ranks = groups[action.group].bytes, groups[action.group].algorithm, groups[action.group].ranks
        own, kind = timing.among(ranks), kind_of(action.route)
        times = own.unshard_us(action.route, size, algorithm), own.issue_us(action.route, size)
        slot = slot_of.get(action.group, -1) if kind.staged else -1
        need_by = index if action.need_by < 0 else action.need_by
        waits.setdefault(need_by, []).append((action.group, len(gathers)))
        flat = kind.needs_device_shard and algorithm is None
        gathers.append(Gather(action.group, _link_of(kind), size, *times, slot, flat))
        if kind.shard_from_host:
            gathers[-1].shard_bytes = size // ranks
            gathers[-1].shard_us, gathers[-1].pieces = own.shard_copy_us(size), shard_pieces(size, ranks)
        return (ISSUE, len(gathers) - 1)

    def stage(action) -> tuple:
        slot_of[action.group] = action.slot
        size = groups[action.group].bytes
        return (STAGE, action.group, action.slot, size, timing.stage_us(size))

    rank = schedule.ranks[pp_rank]
    program.start = [stage(a) for a in rank.start.stage_in] + [gather(a, -1) for a in rank.start.unshard]
    program.start += [(WAIT, number) for _, number in waits.pop(-1, ())]  # waits before the first step
    whole = [(((RUN, sum(times.forward)),), ((RUN, sum(times.backward)),)) for times in timing.layers[pp_rank]]
    reduces = _reduces(groups, spans, workload, timing, pp_rank, steps)
    for index, (entry, step) in enumerate(zip(rank.steps, steps)):
        backward = step.kind == "B"
        chunk = step.stage // pp
        if not entry.unshard and not entry.stage_in and index not in waits and index not in reduces:
            program.steps.append((step.stage, backward, step.microbatch, whole[chunk][backward]))
            continue
        times = timing.layers[pp_rank][chunk]
        layers = times.backward[::-1] if backward else times.forward
        last = len(layers) - 1
        cuts: dict[int, list[tuple]] = {}  # position in run order -> operations before that layer
        for first, operation in reduces.get(index, ()):
            if operation != (SETTLE,):
                cuts.setdefault(last - first + 1, []).append(operation)
        for action in entry.stage_in:
            cuts.setdefault(0, []).append(stage(action))
        for action in entry.unshard:
            place = 0  # the start of the step
            if action.at >= 0:
                place = last - action.at if backward else action.at
            cuts.setdefault(place, []).append(gather(action, index))
        for group, number in waits.pop(index, ()):
            first, final = spans[group]
            cuts.setdefault(last - final if backward else first, []).append((WAIT, number))
        for final, operation in reduces.get(index, ()):
            if operation == (SETTLE,):
                cuts.setdefault(last - final, []).append(operation)
        program.steps.append((step.stage, backward, step.microbatch, _run_between(cuts, layers)))
    return program


def _run_between(cuts: dict[int, list[tuple]], layers: Sequence[float]) -> tuple[tuple, ...]:
    """The operations of a step: the operations at its cuts, and one RUN for the layers between two cuts."""
    operations: list[tuple] = []
    position = 0
    for cut in sorted(cuts):
        if cut > position:
            operations.append((RUN, sum(layers[position:cut])))
            position = cut
        operations += cuts[cut]
    if position < len(layers):
        operations.append((RUN, sum(layers[position:])))
    return tuple(operations)


def _reduces(
    groups, spans, workload: Workload, timing: Timing, pp_rank: int, steps
) -> dict[int, list[tuple[int, tuple]]]:
    """By backward step, pairs (layer, operation) in the order in which the step runs. A reduce has the lowest layer
    that uses its group, at which the gradient becomes complete. A SETTLE has the highest layer of a group that is
    allocated alone. Gradients that stay whole are reduced in the last backward of their chunk."""
    backwards: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        if step.kind == "B":
            backwards.setdefault(step.stage // workload.parallel.pp, []).append(index)
    found: dict[int, list[tuple[int, tuple]]] = {}
    for number, group in enumerate(groups):
        if group.pp_rank != pp_rank:
            continue
        own = timing.among(group.ranks)
        us, visits = own.reduce_us(group.bytes), backwards[group.model_chunk_id]
        if group.gradients is None:
            operation = (REDUCE_GROUP, number, group.bytes, us, None)
            due = visits[-1:] if us else []
        else:
            to_host = None
            if group.gradients == "host":
                as_dense = workload.parallel.as_dense(group.bytes, group.ranks)
                to_host = (as_dense, *own.to_host_us(gradient_bytes(group, workload)))
            operation = (REDUCE_VISIT, number, group.bytes, us, to_host)
            due = [*visits[group.reduce_every - 1 : -1 : group.reduce_every], visits[-1]]
            for index in visits[:: group.reduce_every] if group.alone else ():
                found.setdefault(index, []).append((spans[number][1], (SETTLE,)))
        for index in due:
            found.setdefault(index, []).append((spans[number][0], operation))
    for operations in found.values():
        operations.sort(key=lambda item: -item[0])
    return found
