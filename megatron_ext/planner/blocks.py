"""Blocks: contiguous layers of a chunk whose groups are unsharded and resharded together."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megatron_ext.bounds.least_loads import layer_bytes
from megatron_ext.schedule.group_facts import make_group
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Parameter, Workload, group_bytes


class Block(NamedTuple):
    """Layers ``first`` to ``last`` of a chunk, and the ``groups`` that they compute with: one group per dtype, with
    separate groups for experts and the shared embedding. ``bytes`` is the sum over these groups, with padding. A
    parameter that layers of several blocks use is a group of its own. It belongs to all blocks from its first use to
    its last, because it stays whole within a step."""

    model_chunk_id: int
    first: int
    last: int
    groups: tuple[int, ...]
    bytes: int


Divide = Callable[[list[Parameter]], list[list[Parameter]]]
"""Puts the parameters of a block into groups."""


class Blocks(NamedTuple):
    """All groups, all blocks, and the ids of each stage's blocks in layer order."""

    groups: tuple[Group, ...]
    blocks: tuple[Block, ...]
    of_stage: tuple[tuple[int, ...], ...]


def cut_evenly(chunk: Chunk, parts: int) -> list[int]:
    """First layers of ``parts`` blocks with about equal bytes; fewer blocks if there are fewer layers."""
    sizes = layer_bytes(chunk)
    total, seen, starts = sum(sizes), 0, [0]
    for layer, size in enumerate(sizes):
        if layer and len(starts) < parts and seen * parts >= total * len(starts):
            starts.append(layer)
        seen += size
    return starts


def cut_by_layer(chunk: Chunk) -> list[int]:
    """First layers of blocks of one layer each."""
    return list(range(chunk.num_layers))


def cut_within(workload: Workload, chunk: Chunk, limit: float) -> list[int]:
    """First layers of the fewest blocks of at most ``limit`` bytes each, with padding. A layer that is larger than the
    limit is a block of its own.

    Layers are added to a block as long as they fit. For a fixed order of layers this gives the fewest blocks.
    """
    starts, later = [0], [(p.layer, p.uses[-1], p) for p in chunk.parameters]
    for layer in range(1, chunk.num_layers):
        # A block needs its own parameters and those that it borrows from other layers.
        inside = [p for first, _, p in later if first <= layer]
        parts = _by_kind(inside, lambda p: bool(p.borrowed_by))
        if sum(group_bytes(part, workload.parallel) for part in parts) > limit:
            starts.append(layer)
            later = [use for use in later if use[1] >= layer]
    return starts


def _by_kind(parameters: Iterable[Parameter], alone: Callable[[Parameter], bool]) -> list[list[Parameter]]:
    """Lists of parameters that may share a group: one list per dtype, with separate lists for experts. The shared
    embedding and the parameters that ``alone`` selects have a list each."""
    found: dict[tuple, list[Parameter]] = {}
    for p in parameters:
        key = p.expert, p.dtype, p.name if p.shared_embedding or alone(p) else None
        found.setdefault(key, []).append(p)
    return list(found.values())


def make_blocks(
    workload: Workload, cuts: Sequence[Sequence[int]], split: Divide | None = None, algorithm=None
) -> Blocks:
    """Blocks whose first layers are ``cuts[stage]``. Stages without parameters have no blocks.

    ``split`` divides parameters of a block that may share a group into several groups, which can use different links
    at the same time. By default they are one group. ``algorithm``: see :func:`make_group`.
    """
    groups: list[Group] = []
    blocks: list[Block] = []
    of_stage = []
    for chunk, starts in zip(workload.chunks, cuts):
        spans: dict[int, tuple[int, int]] = {}
        for first, end in zip(starts, [*starts[1:], chunk.num_layers]):
            inside = [parameter for parameter in chunk.parameters if first <= parameter.layer < end]
            for whole in _by_kind(inside, lambda parameter, end=end: parameter.uses[-1] >= end):
                for part in split(whole) if split else [whole]:
                    spans[len(groups)] = first, max(parameter.uses[-1] for parameter in part)
                    groups.append(make_group(workload, chunk.pp_rank, chunk.model_chunk_id, part, algorithm))
        of_stage.append(_add_blocks(blocks, groups, chunk, starts, spans))
    return Blocks(tuple(groups), tuple(blocks), tuple(of_stage))


def blocks_of_groups(workload: Workload, groups: tuple[Group, ...]) -> Blocks:
    """The smallest blocks for given groups: a block begins at each layer where no group has parameters both before
    that layer and from it on."""
    blocks: list[Block] = []
    of_stage = []
    for chunk in workload.chunks:
        spans: dict[int, tuple[int, int]] = {}
        inside: set[int] = set()  # layers at which no block may begin
        for index, group in enumerate(groups):
            if (group.pp_rank, group.model_chunk_id) == (chunk.pp_rank, chunk.model_chunk_id):
                own = chunk.members(group.parameters)
                spans[index] = own.uses
                inside.update(range(own.uses[0] + 1, max(p.layer for p in own.parameters) + 1))
        starts = [layer for layer in range(chunk.num_layers) if layer not in inside]
        of_stage.append(_add_blocks(blocks, groups, chunk, starts, spans))
    return Blocks(groups, tuple(blocks), tuple(of_stage))


def _add_blocks(
    blocks: list[Block], groups: Sequence[Group], chunk: Chunk, starts: Sequence[int], spans: dict[int, tuple[int, int]]
) -> tuple[int, ...]:
    """Add the blocks of a chunk that begin at ``starts``, and return their ids.

    Args:
        spans: by group, the first layer of its parameters and the last layer that uses one of them.
    """
    ids: list[int] = []
    for first, end in zip(starts, [*starts[1:], chunk.num_layers]) if spans else ():
        own = tuple(index for index, span in spans.items() if span[0] < end and span[1] >= first)
        if own:
            begin = first if ids else 0  # leading layers without parameters belong to the first block
            ids.append(len(blocks))
            size = sum(groups[index].bytes for index in own)
            blocks.append(Block(chunk.model_chunk_id, begin, end - 1, own, size))
        elif ids:
            blocks[-1] = blocks[-1]._replace(last=end - 1)
    return tuple(ids)


class BlockUse(NamedTuple):
    """One step computes one block, for ``us`` microseconds. ``before`` and ``after`` are the layers (``at``) of actions
    just before and just after the block; -1 at the beginning and the end of the step."""

    step: int
    block: int
    us: float
    before: int
    after: int


def block_uses_of_rank(workload: Workload, timing: Timing, blocks: Blocks, pp_rank: int) -> list[BlockUse]:
    """All uses of all blocks on a rank, in the order in which they compute. The block is -1 if a chunk has no
    parameters."""
    pp = workload.parallel.pp
    patterns: dict[tuple[int, str], list[tuple[int, float, int, int]]] = {}
    for chunk in range(workload.parallel.vp):
        ids = blocks.of_stage[chunk * pp + pp_rank]
        times = timing.layers[pp_rank][chunk]
        for kind, layers in (("F", times.forward), ("B", times.backward)):
            if not ids:
                patterns[chunk, kind] = [(-1, sum(layers), -1, -1)]
                continue
            ordered = ids if kind == "F" else ids[::-1]
            pattern = []
            for number, block_id in enumerate(ordered):
                block = blocks.blocks[block_id]
                begin, end = (block.first, block.last) if kind == "F" else (block.last, block.first)
                before = -1 if number == 0 else begin
                after = -1 if number == len(ordered) - 1 else end
                pattern.append((block_id, sum(layers[block.first : block.last + 1]), before, after))
            patterns[chunk, kind] = pattern
    return [
        BlockUse(index, *use)
        for index, step in enumerate(steps_of_ranks(workload.parallel)[pp_rank])
        for use in patterns[step.stage // pp, step.kind]
    ]
