"""Chooses for every group how its gradients are kept and where its shard rests, so that ``limits.device_bytes`` holds.

A rule leaves some bytes for whole parameters and gives an order of reliefs. Groups are relieved one by one, the largest
first, until everything that a rank holds fits; no more groups than necessary are relieved.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from megatron_ext.bounds.feasibility import largest_layers
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.group_uses import uses_of_groups
from megatron_ext.schedule.host_shards import steps_on_host_shards
from megatron_ext.schedule.memory_bill import activation_peaks, gradient_bytes, resting_bytes
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.route import piece_buffer_bytes
from megatron_ext.workload.workload import Workload, group_bytes

Relief = Literal["sharded", "host", "shards"]
"""Gradients added up in shards on the device, or in host memory; shards that rest in host memory."""

ORDERS: tuple[tuple[Relief, ...], ...] = (
    ("sharded", "host", "shards"),
    ("shards", "sharded", "host"),
    ("sharded", "shards", "host"),
    ("host", "shards"),
)


class Rule(NamedTuple):
    """How groups are relieved.

    Attributes:
        whole_bytes: left for whole parameters at zero stage 3; None at zero stage 2, which keeps all of them.
        reliefs: tried in this order.
        reduce_every: of gradients that come and go.
    """

    whole_bytes: int | None
    reliefs: tuple[Relief, ...]
    reduce_every: int = 1


def rules(workload: Workload, reliefs: frozenset[Relief]) -> Iterator[Rule]:
    """Rules worth trying, those that leave most for whole parameters first."""
    orders: dict[tuple[Relief, ...], None] = dict.fromkeys(
        tuple(name for name in order if name in reliefs) for order in ORDERS
    )
    parallel = workload.parallel
    visits = {1} | ({parallel.microbatch_group_size} if parallel.order == "interleaved" else set())
    for whole_bytes in _whole_bytes(workload):
        for every in sorted(visit for visit in visits if visit <= parallel.num_microbatches):
            for order in orders:
                yield Rule(whole_bytes, order, every)


def _whole_bytes(workload: Workload) -> list[int | None]:
    if workload.zero_stage < 3:
        return [None]
    parallel = workload.parallel
    everything = max(
        sum(group_bytes([p], parallel.dp) for chunk in workload.chunks_of_rank(rank) for p in chunk.parameters)
        for rank in range(parallel.pp)
    )
    least = max(largest_layers(workload))
    most = min(everything, workload.limits.whole_parameter_bytes or everything)
    sizes: set[int] = {most, most // 2, most // 4, 3 * least, 2 * least, least}
    return [*sorted((size for size in sizes if least <= size <= most), reverse=True)]


class Placer:
    """Relieves groups by one rule; called with all groups of a candidate.

    Args:
        workload: with ``limits.device_bytes``.
    """

    def __init__(self, workload: Workload, rule: Rule):
        self.workload, self.rule = workload, rule
        self.activations = activation_peaks(workload)
        limit = workload.limits.device_bytes
        assert limit is not None
        self.limit = limit
        self.fixed = [_fixed_bytes(workload, rank) for rank in range(workload.parallel.pp)]

    def __call__(self, groups: Sequence[Group]) -> tuple[Group, ...] | None:
        """The groups with ``gradients``, ``reduce_every`` and ``shard_rests``; None where memory is short."""
        placed, spans = list(groups), uses_of_groups(groups, self.workload)
        for rank in range(self.workload.parallel.pp):
            own = [index for index, group in enumerate(groups) if group.pp_rank == rank]
            relieved = self._relieve(rank, [placed[index] for index in own], [spans[index] for index in own])
            if relieved is None:
                return None
            for index, group in zip(own, relieved):
                placed[index] = group
        return tuple(placed)

    def _relieve(self, rank: int, groups: list[Group], spans) -> list[Group] | None:
        for relief in self.rule.reliefs:
            if self._fits(rank, groups, spans):
                return groups
            number = sum(self._relieved(group, relief) is not group for group in groups)
            every = self._relieve_some(groups, relief, number)
            if self._fits(rank, every, spans):
                low, high = 1, number
                while low < high:  # ends: each turn halves the range
                    middle = (low + high) // 2
                    fits = self._fits(rank, self._relieve_some(groups, relief, middle), spans)
                    low, high = (low, middle) if fits else (middle + 1, high)
                return self._relieve_some(groups, relief, low)
            groups = every
        return groups if self._fits(rank, groups, spans) else None

    def _relieve_some(self, groups: list[Group], relief: Relief, number: int) -> list[Group]:
        """The groups with the ``number`` largest of those relieved that can be."""
        changed = {index: self._relieved(group, relief) for index, group in enumerate(groups)}
        usable = [index for index in changed if changed[index] is not groups[index]]
        chosen = {*sorted(usable, key=lambda index: (-groups[index].bytes, index))[:number]}
        return [changed[index] if index in chosen else group for index, group in enumerate(groups)]

    def _relieved(self, group: Group, relief: Relief) -> Group:
        """``group`` itself where it cannot be relieved, or not further."""
        members = [
            p
            for p in self.workload.chunk(group.pp_rank, group.model_chunk_id).parameters
            if p.name == group.parameters[0]
        ]
        if relief == "shards":
            if group.shard_rests == "host" or not steps_on_host_shards(self.workload.optimizer, members[0].dtype):
                return group
            return replace(group, shard_rests="host", algorithm=None)
        more = group.gradients is None or (relief == "host" and group.gradients == "sharded")
        if not more or members[0].shared_embedding or (relief == "sharded" and self.workload.parallel.dp == 1):
            return group
        return replace(group, gradients=relief, reduce_every=self.rule.reduce_every)

    def _fits(self, rank: int, groups: list[Group], spans) -> bool:
        return sum(self.held(rank, groups, spans).values()) <= self.limit

    def held(self, rank: int, groups: list[Group], spans) -> dict[str, int]:
        """By kind, at least what the rank holds at its peak: all kinds are taken to be largest at once."""
        dp, zero_3 = self.workload.parallel.dp, self.workload.zero_stage == 3
        sizes = [gradient_bytes(group, self.workload) for group in groups]
        on_device = [group for group in groups if group.shard_rests is None]
        whole = self.rule.whole_bytes
        pieces = max((piece_buffer_bytes(group.bytes) for group in groups if group.shard_rests), default=0)
        legs = max((2 * group.bytes for group in groups if group.algorithm is not None), default=0)
        coming = [(group, span, size) for group, span, size in zip(groups, spans, sizes) if group.gradients]
        return {
            "whole_parameters": sum(group.bytes for group in groups) if whole is None else whole,
            "shards": sum(group.bytes // dp for group in on_device) if zero_3 else 0,
            "gradients": sum(size for group, size in zip(groups, sizes) if group.gradients is None)
            + _coming_and_going(coming, self.workload),
            "gradient_shards": sum(size // dp for group, size in zip(groups, sizes) if group.gradients == "sharded"),
            "optimizer": self.fixed[rank],
            "activations": self.activations[rank],
            "buffers": pieces + legs,
        }


def _fixed_bytes(workload: Workload, rank: int) -> int:
    """Main parameters and optimizer states on the device; no grouping has less."""
    groups = [
        Group(
            pp_rank=rank,
            model_chunk_id=chunk.model_chunk_id,
            parameters=(p.name,),
            bytes=group_bytes([p], workload.parallel.dp),
        )
        for chunk in workload.chunks_of_rank(rank)
        for p in chunk.parameters
    ]
    by_parameter, _ = resting_bytes(groups, workload)
    return by_parameter.get("main_parameters", 0) + by_parameter.get("optimizer_states", 0)


def _coming_and_going(groups: list[tuple[Group, tuple[int, int], int]], workload: Workload) -> int:
    """At least the bytes of whole gradients that come and go at their peak: ``(group, its layers, bytes)``.

    In a backward there are those whose layers are in progress, and the one that was reduced last. Those that are not
    reduced every time stay for several backward steps; in the interleaved order these are of one chunk at a time, if
    they are as many as a group of micro-batches.
    """
    chunks: dict[int, list[tuple[tuple[int, int], int]]] = {}
    staying: dict[int, int] = {}
    for group, span, size in groups:
        if group.reduce_every == 1:
            chunks.setdefault(group.model_chunk_id, []).append((span, size))
        else:
            staying[group.model_chunk_id] = staying.get(group.model_chunk_id, 0) + size
    one_chunk = all(group.reduce_every in (1, workload.parallel.microbatch_group_size) for group, *_ in groups)
    one_chunk = one_chunk and workload.parallel.order == "interleaved"
    stay = (max if one_chunk else sum)(staying.values()) if staying else 0
    before = max((size for _, _, size in groups), default=0)
    return stay + max((_peak_of_backward(mine, before) for mine in chunks.values()), default=before if stay else 0)


def _peak_of_backward(groups: list[tuple[tuple[int, int], int]], on_its_way: int) -> int:
    there, peak = 0, on_its_way
    for layer in range(max(last for (_, last), _ in groups), -1, -1):
        there += sum(size for (_, last), size in groups if last == layer)
        peak = max(peak, there + on_its_way)
        for (first, _), size in groups:
            if first == layer:
                there, on_its_way = there - size, size
    return peak


def least_held(workload: Workload, groups: Sequence[Group], reliefs: frozenset[Relief]) -> list[dict[str, int]]:
    """By pipeline rank, what it holds at least, with everything relieved that can be."""
    whole = min((size for size in _whole_bytes(workload) if size is not None), default=None)
    placer = Placer(workload, Rule(whole, tuple(name for name in ORDERS[0] if name in reliefs)))
    found = []
    for rank in range(workload.parallel.pp):
        own = [group for group in groups if group.pp_rank == rank]
        spans = uses_of_groups(own, workload)
        ways = [own]
        for relief in placer.rule.reliefs:
            ways.append(placer._relieve_some(ways[-1], relief, len(own)))
        found.append(min((placer.held(rank, way, spans) for way in ways), key=lambda held: sum(held.values())))
    return found


def refuse(workload: Workload, groups: Sequence[Group], reliefs: frozenset[Relief], advice: str) -> InputError:
    """The error for a workload that no rule makes fit: what a rank holds at least, by kind, and what is missing."""
    limit = workload.limits.device_bytes
    assert limit is not None
    held = least_held(workload, groups, reliefs)
    rank = max(range(len(held)), key=lambda index: sum(held[index].values()))
    need = sum(held[rank].values())
    kinds = ", ".join(f"{kind.replace('_', ' ')} {size}" for kind, size in held[rank].items() if size)
    short = f"{need - limit} bytes short" if need > limit else "which no grouping that can be gathered keeps"
    return InputError(
        f"cannot fit: pipeline rank {rank} holds at least {need} bytes ({kinds}), {short}{advice}",
        field="limits.device_bytes",
        value=limit,
    )
