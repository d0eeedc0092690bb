"""Random valid schedules, to test that any schedule that validates trains like stock Megatron.

Everything that is free is drawn at random: groups (contiguous or not), routes, issue steps, ``need_by``, staging slots,
and at zero stage 3 what stays whole between steps.
"""

import random
from math import inf

from megatron_ext.bounds.feasibility import check_fits
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import Freed, Placed, assemble
from megatron_ext.planner.stock import stream
from megatron_ext.schedule.footprint import pinned_need
from megatron_ext.schedule.group_facts import make_group
from megatron_ext.schedule.user_defined_schedule import PlanOptions, Schedule
from megatron_ext.workload.bucket_rules import buckets, layer_buckets
from megatron_ext.workload.route import ALL_GATHER, Route, kind_of
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Workload, group_bytes


def random_schedule(workload: Workload, routes: tuple[Route, ...], seed: int) -> Schedule:
    """A valid schedule drawn with ``seed``. ``routes`` are the routes that the cost table offers.

    Raises:
        InputError: no schedule fits the limits.
    """
    check_fits(workload)
    draw = random.Random(seed)
    groups, of_stage = [], []
    padded = [_padded(workload, rank) for rank in range(workload.parallel.pp)]
    limit, zero_3 = workload.limits.whole_parameter_bytes, workload.zero_stage == 3
    limit = inf if limit is None else limit
    streams = [zero_3 and max(sizes) > limit for sizes in padded]
    for chunk in workload.chunks:
        parts = _parts(chunk, streams[chunk.pp_rank], not zero_3 and sum(padded[chunk.pp_rank]) > limit, draw)
        of_stage.append(list(range(len(groups), len(groups) + len(parts))))
        groups += [make_group(workload, chunk.pp_rank, chunk.model_chunk_id, part) for part in parts]
    routed = _affordable_routes(workload, groups, routes, draw)
    placed, freed = [], []
    for pp_rank in range(workload.parallel.pp):
        own = of_stage[pp_rank :: workload.parallel.pp]
        if workload.zero_stage < 3:
            unshards, reshards = _zero1(workload, pp_rank, own, routed, draw), []
        elif streams[pp_rank]:
            unshards, reshards = _streamed(workload, pp_rank, own, routed)
        else:
            unshards, reshards = _zero3(workload, pp_rank, own, groups, routed, draw)
        placed.append(with_slots(unshards, workload.limits.nvme_slots, draw, routes))
        freed.append(reshards)
    return assemble(workload, groups, placed, freed, planner="random", options=PlanOptions(seed=seed))


def _padded(workload: Workload, pp_rank: int) -> list[int]:
    """Bytes of each chunk of a rank with the worst padding, which occurs with one group per parameter."""
    chunks = workload.chunks_of_rank(pp_rank)
    return [sum(group_bytes([p], workload.parallel) for p in chunk.parameters) for chunk in chunks]


def _parts(chunk: Chunk, by_layer: bool, by_bucket: bool, draw: random.Random) -> list[list]:
    """Groups of a chunk: by layer if the chunk may not fit whole, by bucket if all chunks are whole and the padding of
    more groups may not fit, and otherwise at random."""
    if by_layer:
        return layer_buckets(chunk)
    return buckets(chunk) if by_bucket else random_groups(chunk, draw)


def random_groups(chunk: Chunk, draw: random.Random) -> list[list]:
    """Parameters of a chunk cut into groups at random. Each group has one dtype, has either only experts or none, and
    is in execution order."""
    parts = []
    by_kind: dict[tuple[bool, str], list] = {}
    for parameter in chunk.parameters:
        if parameter.shared_embedding:
            parts.append([parameter])
        else:
            by_kind.setdefault((parameter.expert, parameter.dtype), []).append(parameter)
    for members in by_kind.values():
        number = draw.randint(1, min(len(members), draw.choice((1, 2, 4, 8))))
        if draw.random() < 0.5:  # contiguous
            cuts = sorted(draw.sample(range(1, len(members)), number - 1))
            parts += [members[a:b] for a, b in zip([0, *cuts], [*cuts, len(members)])]
        else:
            bins: list[list] = [[] for _ in range(number)]
            for parameter in members:
                draw.choice(bins).append(parameter)
            parts += [part for part in bins if part]
    draw.shuffle(parts)
    return parts


def _affordable_routes(workload: Workload, groups, routes, draw: random.Random) -> list[str]:
    """A random route for every group, within the pinned host memory of every node."""
    limits = workload.limits
    usable = [route for route in routes if limits.nvme_slots or not kind_of(route).staged]
    routed = []
    for group in groups:
        large = limits.nvme_slot_bytes is not None and group.bytes > limits.nvme_slot_bytes
        possible = [route for route in usable if not (large and kind_of(route).staged)]
        if not possible:
            said = f"cannot fit: a group of {group.bytes} bytes has no other route"
            raise InputError(said, field="limits.nvme_slot_bytes", value=limits.nvme_slot_bytes)
        routed.append(draw.choice(possible))
    order = draw.sample(range(len(groups)), len(groups))
    while (limit := limits.pinned_host_bytes) is not None:  # ends: each turn shortens order
        kinds = list(enumerate(map(kind_of, routed)))
        hosted, staged = {g for g, kind in kinds if kind.reads_host_copy}, {g for g, kind in kinds if kind.staged}
        if not order or max(pinned_need(workload, groups, hosted, staged), default=0) <= limit:
            break
        if ALL_GATHER not in usable:
            said = f"cannot fit: without route {ALL_GATHER} every group needs pinned memory"
            raise InputError(said, field="limits.pinned_host_bytes", value=limit)
        routed[order.pop()] = ALL_GATHER
    return routed


def _zero1(workload, pp_rank, own, routed, draw) -> list[Placed]:
    chunks = [step.stage // workload.parallel.pp for step in steps_of_ranks(workload.parallel)[pp_rank]]
    unshards = []
    for chunk, ids in enumerate(own):
        first = chunks.index(chunk)
        for group in ids:
            need_by = draw.randint(max(0, first - draw.choice((0, 0, 3))), first)
            unshards.append(Placed(group, routed[group], draw.randint(-1, need_by), need_by))
    draw.shuffle(unshards)
    return sorted(unshards, key=lambda item: item.issue)


def _zero3(workload, pp_rank, own, groups, routed, draw) -> tuple[list[Placed], list[Freed]]:
    """Unshards and reshards step by step. Before each step, it gathers what the step needs and some of what the next
    step needs. After it, it frees some groups at random, and as many as necessary for the next step."""
    limit = inf if workload.limits.whole_parameter_bytes is None else workload.limits.whole_parameter_bytes
    order = [own[step.stage // workload.parallel.pp] for step in steps_of_ranks(workload.parallel)[pp_rank]]
    size = lambda ids: sum(groups[g].bytes for g in ids)
    keep, eager = draw.choice((0.0, 0.5, 0.9)), draw.choice((0.0, 0.3, 0.8))
    whole: set[int] = set()
    unshards, reshards = [], []
    for index in range(-1, len(order)):
        following = order[index + 1] if index + 1 < len(order) else []
        if index >= 0:
            unshards += [Placed(g, routed[g], index, index) for g in order[index] if g not in whole]
            whole.update(order[index])
        early = set()
        for group in following:
            if group not in whole and draw.random() < eager and size(whole | {group}) <= limit:
                unshards.append(Placed(group, routed[group], index, index + 1))
                whole.add(group)
                early.add(group)
        loose = sorted(whole - early) if index >= 0 else []
        for group in draw.sample(loose, len(loose)):
            forced = group not in following and size(whole.union(following)) > limit
            if forced or draw.random() > keep:
                reshards.append(Freed(group, index))
                whole.discard(group)
    return unshards, reshards


def _streamed(workload, pp_rank, own, routed) -> tuple[list[Placed], list[Freed]]:
    """Unshards and reshards layer by layer inside every step, for ranks on which not even one chunk fits whole."""
    pp = workload.parallel.pp
    unshards, reshards = [], []
    for index, step in enumerate(steps_of_ranks(workload.parallel)[pp_rank]):
        chunk = workload.chunk(pp_rank, step.stage // pp)
        parts = list(zip(own[chunk.model_chunk_id], layer_buckets(chunk)))
        spans = {group: (part[0].layer, max(part[0].uses)) for group, part in parts}
        brought, freed = stream(spans, dict.fromkeys(spans, 1), chunk.num_layers, step.kind, 0)  # one layer at a time
        unshards += [Placed(a.group, routed[a.group], index, index, at=a.at) for a in brought]
        reshards += [Freed(a.group, index, at=a.at) for a in freed]
    return unshards, reshards


def with_slots(unshards: list[Placed], slots: int, draw: random.Random, routes) -> list[Placed]:
    """Give unshards through staging slots a slot and a step at which they are staged in. Without a free slot they use
    all-gathers.

    Raises:
        InputError: no slot is free, and all-gathers are not among ``routes``.
    """
    free_after = dict.fromkeys(range(slots), -2)  # slot -> step of the unshard that empties it
    taken: dict[int, int] = {}  # group -> step of its latest unshard from a slot
    result = []
    for item in unshards:
        if kind_of(item.route).staged:
            before = taken.get(item.group, -2)
            usable = [slot for slot, step in free_after.items() if max(step, before) < item.issue]
            if not usable:
                if ALL_GATHER not in routes:
                    said = f"cannot fit: no slot is free, and there is no {ALL_GATHER} route"
                    raise InputError(said, field="limits.nvme_slots", value=slots)
                item = item._replace(route=ALL_GATHER)
            else:
                slot = draw.choice(usable)
                item = item._replace(slot=slot, stage=draw.randint(max(free_after[slot], before) + 1, item.issue))
                free_after[slot] = taken[item.group] = item.issue
        result.append(item)
    return result
