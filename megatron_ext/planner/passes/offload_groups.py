"""Pass: which gradients and shards go elsewhere. The cheapest are moved first, until the rank's memory fits, and no
more than that.

[Note: Which groups are relieved]
Relieving a group frees its whole gradient, or its shard, and takes time of links at every visit. Gradients that come
and go are whole around their use, so the largest relieved group and its neighbour remain a part of the peak. Large
groups take less time per byte, small groups leave a smaller peak. Both orders are tried. Groups of equal size are
ordered from the last layer on, because the reduces of late layers overlap with the rest of the backward. Groups are
relieved in that order until everything fits. Then relief is undone for groups that fit without it, the most expensive
first. The order that costs less by the cost table is chosen.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, groupby, product
from math import ceil, inf
from typing import Literal, NamedTuple

from msgspec.structs import replace

from megatron_ext.bounds.host_room import optimizer_on_host
from megatron_ext.bounds.memory_headroom import least_of_states
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.bill_by_step import activation_peaks
from megatron_ext.schedule.group_facts import gradient_bytes, members_of, steps_on_host_shards, uses_of_groups
from megatron_ext.schedule.host_slots import rounding_bytes
from megatron_ext.schedule.memory_bill import on_nodes
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.nodes import ranks_of_copy
from megatron_ext.workload.route import HOST_COPY, SHARD_GATHER, piece_buffer_bytes
from megatron_ext.workload.state_layout import GRADIENT_SLOTS
from megatron_ext.workload.whole_gradients import may_rest_on_host
from megatron_ext.workload.workload import Limits, Workload

Relief = Literal["sharded", "host", "alone", "shards"]
"""What can be relieved: gradients are added up in shards on the device ("sharded") or in host memory ("host"); of
these, a gradient is allocated once the previous one is freed ("alone"); shards rest in host memory ("shards")."""


class Rule(NamedTuple):
    """How groups are relieved.

    Attributes:
        whole_bytes: bytes left for whole parameters at zero stage 3; None at zero stage 2, which keeps all of them.
        reliefs: the reliefs, in the order in which they are tried.
        reduce_every: ``reduce_every`` of gradients that come and go.
    """

    whole_bytes: int | None
    reliefs: tuple[Relief, ...]
    reduce_every: int = 1


class Residency(NamedTuple):
    """Where a group's gradients are, whether its shard rests in host memory, and whether its whole gradient is
    allocated alone."""

    gradients: Literal["sharded", "host"] | None = None
    shard_on_host: bool = False
    alone: bool = False

    @classmethod
    def of(cls, group: Group) -> "Residency":
        """The residency of a group of a schedule."""
        return cls(group.gradients, group.shard_rests == "host", group.alone)


class OffloadCosts(NamedTuple):
    """A group of one rank, with the bytes that relieving it frees and the time that it costs.

    Attributes:
        span: its first and last layer.
        gradient: bytes of the whole gradient.
        rounding: bytes of the buffer on the device in which the optimizer there rounds the group, if its shard rests in
            host memory.
        ways: the ways in which the group can be kept.
        cost_us: by way, microseconds of links per iteration in addition to what the group takes when it is not
            relieved.
        held: by way, what the group adds to the bytes of its rank (:meth:`Offloader.held`).
    """

    group: Group
    span: tuple[int, int]
    gradient: int
    rounding: int
    ways: dict[Residency, float]
    held: dict[Residency, tuple[int, int, int, int]]


class Offloader:
    """Relieves groups by one rule. It is called with all groups of a candidate.

    Args:
        workload: must have ``limits.device_bytes``.
    """

    def __init__(self, workload: Workload, rule: Rule, timing: Timing):
        self.workload, self.rule, self.timing = workload, rule, timing
        self.activations = activation_peaks(workload)
        assert workload.limits.device_bytes is not None
        self.limit = workload.limits.device_bytes
        unlimited, parallel = replace(workload, limits=Limits()), workload.parallel  # a search tries many limits
        self.fixed, self.optimizer = _fixed_bytes(unlimited), optimizer_on_host(unlimited, on_drive=True)
        self.sharing = {ranks: ranks_of_copy(parallel, 0, ranks) for ranks in (parallel.dp, parallel.expert_dp)}
        self.by_shards = timing.offers(SHARD_GATHER)
        self._costs: dict[tuple, tuple[dict[Residency, float], dict[Residency, tuple[int, int, int, int]]]] = {}

    def __call__(self, groups: Sequence[Group]) -> tuple[Group, ...] | None:
        """The groups with ``gradients``, ``reduce_every`` and ``shard_rests`` set; None if memory is short."""
        placed, ranks = list(groups), list(self.by_rank(groups))
        found = [self._relieve(rank, weighed) for rank, _, weighed in ranks]
        chosen = self._within_host([weighed for *_, weighed in ranks], found)
        if chosen is None:
            return None
        for (_, indices, _), kept in zip(ranks, chosen):
            for index, way in zip(indices, kept):
                placed[index] = self.kept_as(groups[index], way)
        return tuple(placed)

    def _within_host(
        self, weighed: list[list[OffloadCosts]], found: list[list[list[Residency]]]
    ) -> list[list[Residency]] | None:
        """The cheapest combination of the ways found for every rank (cheapest first) with which every node keeps its
        limits of host memory. As far as necessary, one rank after the other takes the way that needs the least host
        memory. None if a rank has no way, or if no combination keeps the limits."""
        if not all(found):
            return None
        chosen = [kepts[0] for kepts in found]
        for number in range(-1, len(found)):
            if number >= 0:
                chosen[number] = min(found[number], key=lambda kept, mine=weighed[number]: self.on_host(mine, kept))
            if self._keeps_host([self.on_host(mine, kept) for mine, kept in zip(weighed, chosen)]):
                return chosen
        return None

    def _keeps_host(self, of_ranks: Sequence[tuple[int, int]]) -> bool:
        """Whether every node keeps ``limits.host_bytes`` and ``limits.pinned_host_bytes``, by :meth:`on_host`."""
        limits = self.workload.limits
        host, pinned = (on_nodes(self.workload, [pair[kind] for pair in of_ranks]) for kind in (0, 1))
        held = max(map(sum, zip(host, self.optimizer)))
        pairs = ((held, limits.host_bytes), (max(pinned), limits.pinned_host_bytes))
        return all(limit is None or need <= limit for need, limit in pairs)

    def on_host(self, weighed: Sequence[OffloadCosts], kept: Sequence[Residency]) -> tuple[int, int]:
        """Bytes that each rank holds in host memory, and how many of them are pinned. These are gradients and shards
        that rest there, the slots through which these gradients come, and the rank's part of the host copies by which
        these shards come back, if no other route brings them."""
        own = [one.gradient // one.group.ranks for one, way in zip(weighed, kept) if way.gradients == "host"]
        gradients, shards = sum(own) + GRADIENT_SLOTS * max(own, default=0), 0
        for one, way in zip(weighed, kept):
            if way.shard_on_host:
                shards += one.group.bytes // one.group.ranks
                shards += 0 if self.by_shards else one.group.bytes // self.sharing[one.group.ranks]
        return gradients + shards, shards

    def filled(self, groups: Sequence[Group]) -> Rule:
        """The rule with the bytes that ``groups`` leave below the limit added to whole parameters, as far as their own
        limit allows."""
        if self.rule.whole_bytes is None:
            return self.rule
        left = [
            self.limit - self.held(rank, weighed, [Residency.of(one.group) for one in weighed])
            for rank, _, weighed in self.by_rank(groups)
        ]
        most = self.workload.limits.whole_parameter_bytes
        whole = self.rule.whole_bytes + max(min(left), 0)
        return self.rule._replace(whole_bytes=whole if most is None else min(whole, most))

    def cost_us(self, groups: Sequence[Group], placed: Sequence[Group]) -> float:
        """Link time in microseconds of the relief that made ``placed`` from ``groups``, for the rank that has most."""
        return max(
            sum(one.ways[Residency.of(placed[index])] for index, one in zip(indices, weighed))
            for _, indices, weighed in self.by_rank(groups)
        )

    def by_rank(self, groups: Sequence[Group]):
        """By pipeline rank: its number, the indices of its groups, and the costs of these groups."""
        spans = uses_of_groups(groups, self.workload)
        for rank in range(self.workload.parallel.pp):
            indices = [index for index, group in enumerate(groups) if group.pp_rank == rank]
            yield rank, indices, [self._place(groups[index], spans[index]) for index in indices]

    def _place(self, group: Group, span: tuple[int, int]) -> OffloadCosts:
        first, gradient = members_of(group, self.workload).parameters[0], gradient_bytes(group, self.workload)
        gradients: list = [None]
        if not first.shared_embedding and not self.workload.keeps_gradients:
            if group.ranks > 1:
                gradients.append("sharded")
            if may_rest_on_host(first.dtype, self.workload.optimizer.on_host):
                gradients.append("host")
        on_host = "shards" in self.rule.reliefs and steps_on_host_shards(self.workload.optimizer, first.dtype)
        key = group.bytes, group.ranks, group.algorithm, gradient, len(gradients), on_host  # layers are alike
        if key not in self._costs:
            shards = (False, True) if on_host else (False,)
            ways = [Residency(kept, shard, alone) for kept, shard, alone in product(gradients, shards, (False, True))]
            ways = [way for way in ways if way.gradients is not None or not way.alone]
            held = {way: self._held(group, gradient, way) for way in ways}
            self._costs[key] = {way: self._cost_us(group, gradient, way) for way in ways}, held
        rounding = rounding_bytes([replace(group, shard_rests="host")], self.workload) if on_host else 0
        return OffloadCosts(group, span, gradient, rounding, *self._costs[key])

    def _held(self, group: Group, gradient: int, way: Residency) -> tuple[int, int, int, int]:
        """Bytes of a group that rest on the device, bytes that come there for the optimizer's step, and the bytes of
        two buffers that all groups share."""
        size, ranks = group.bytes, group.ranks
        resting = {None: gradient, "sharded": gradient // ranks, "host": 0}[way.gradients]
        brought = gradient // ranks if way.gradients == "host" and not self.workload.optimizer.on_host else 0
        if way.shard_on_host:
            return resting, brought, piece_buffer_bytes(size, ranks), 0
        resting += size // ranks if self.workload.zero_stage == 3 else 0
        return resting, brought, 0, 2 * size if group.algorithm else 0

    def _cost_us(self, group: Group, gradient: int, way: Residency) -> float:
        timing, size = self.timing.among(group.ranks), group.bytes
        visits, us = self.workload.parallel.num_microbatches, 0.0
        reduces = ceil(visits / self.rule.reduce_every)
        try:
            if way.gradients is not None:
                us += (reduces - 1) * timing.reduce_us(size)
            if way.gradients == "host":
                us += reduces * sum(timing.to_host_us(gradient))
            if way.alone:
                us += reduces * timing.reduce_us(size)
                us += reduces * timing.to_host_us(gradient)[0] if way.gradients == "host" else 0.0
            if way.shard_on_host and timing.offers(HOST_COPY):
                us += 2 * visits * timing.shard_copy_us(size)
        except InputError:  # the size was not measured
            return inf
        return us

    def _relieve(self, rank: int, weighed: list[OffloadCosts]) -> list[list[Residency]]:
        """Ways to keep the groups of a rank with which everything fits, the cheapest first."""
        start = [Residency() for _ in weighed]
        if self.held(rank, weighed, start) <= self.limit:
            return [start]
        found = [self._in_order(rank, weighed, start, order) for order in _orders(weighed)]
        return sorted(
            (kept for kept in found if kept is not None),
            key=lambda kept: sum(one.ways[way] for one, way in zip(weighed, kept)),
        )

    def _in_order(
        self, rank: int, weighed: list[OffloadCosts], kept: list[Residency], order: list[int]
    ) -> list[Residency] | None:
        """Relieve groups in ``order``, by one relief after the other."""
        held = lambda kept: self.held(rank, weighed, kept)
        fits = lambda kept: held(kept) <= self.limit
        for relief in self.rule.reliefs:
            changed = [relieved(one, way, relief) for one, way in zip(weighed, kept)]
            usable = [index for index in order if changed[index] != kept[index]]
            first = partial(_first_changed, kept, changed, usable)
            least, least_held, begin = kept, held(kept), 0
            # After the last group of a size, the peak of gradients that come and go may rise again.
            sizes = groupby(usable, lambda index: weighed[index].group.bytes)
            for end in accumulate(len(list(same)) for _, same in sizes):
                now = held(first(end))
                if now <= self.limit:
                    enough = lambda number, first=first: fits(first(number))
                    number = bisect_left(range(end), True, begin + 1, end, key=enough)
                    return self._given_back(weighed, first(number), fits)
                if now < least_held:
                    least, least_held = first(end), now
                begin = end
            kept = least
        return None

    def _given_back(
        self, weighed: list[OffloadCosts], kept: list[Residency], fits: Callable[[list[Residency]], bool]
    ) -> list[Residency]:
        """``kept`` with every group relieved less if everything still fits, starting with the most expensive. If a way
        did not fit for one group, it is not tried for equal groups."""
        failed: set[tuple] = set()
        for index in sorted(range(len(weighed)), key=lambda index: (-weighed[index].ways[kept[index]], index)):
            one = weighed[index]
            for way in sorted(one.ways, key=lambda way: one.ways[way]):
                if way == kept[index]:
                    break
                like = one.group.pp_rank, one.group.bytes, one.group.ranks, one.gradient, kept[index], way
                if like in failed:
                    continue
                other = [*kept[:index], way, *kept[index + 1 :]]
                if fits(other):
                    kept = other
                    break
                failed.add(like)
        return kept

    def given_back(self, groups: Sequence[Group], fits: Callable[[tuple[Group, ...]], bool]) -> tuple[Group, ...]:
        """Relieved groups, each relieved less if everything still ``fits``, starting with the most expensive."""
        weighed = list(map(self._place, groups, uses_of_groups(groups, self.workload)))
        kept_as = lambda kept: tuple(map(self.kept_as, groups, kept))
        return kept_as(self._given_back(weighed, list(map(Residency.of, groups)), lambda kept: fits(kept_as(kept))))

    def kept_as(self, group: Group, way: Residency) -> Group:
        """``group`` kept in the way ``way``, with the rule's ``reduce_every``."""
        every, algorithm = self.rule.reduce_every if way.gradients else 1, group.algorithm
        if way.shard_on_host:
            algorithm = None
        elif group.shard_rests:
            algorithm = self.timing.algorithm(group.pp_rank, group.bytes, group.ranks)
        rests = "host" if way.shard_on_host else None
        kept = dict(gradients=way.gradients, reduce_every=every, alone=way.alone)
        return replace(group, **kept, shard_rests=rests, algorithm=algorithm)

    def held(self, rank: int, weighed: list[OffloadCosts], kept: list[Residency]) -> int:
        """A lower bound of the bytes that the rank holds at its peak: in a step of the pipeline, assuming that all
        kinds of bytes are largest at the same time, or while its optimizer steps."""
        zero_3 = self.workload.zero_stage == 3
        whole = sum(one.group.bytes for one in weighed) if self.rule.whole_bytes is None else self.rule.whole_bytes
        resting, brought, pieces, legs = zip(*[one.held[way] for one, way in zip(weighed, kept)] or [(0, 0, 0, 0)])
        rounding = max([one.rounding for one, way in zip(weighed, kept) if way.shard_on_host], default=0)
        moving = self.activations[rank] + self._coming_and_going(weighed, kept) + (whole if zero_3 else 0)
        buffers = max(pieces) + max(legs) + rounding
        return self.fixed[rank] + (0 if zero_3 else whole) + sum(resting) + buffers + max(moving, sum(brought))

    def _coming_and_going(self, weighed: list[OffloadCosts], kept: list[Residency]) -> int:
        """A lower bound of the peak bytes of whole gradients that come and go.

        In a backward there are the gradients whose layers are in progress, and the gradient that was reduced last.
        Gradients that are not reduced every time stay for several backward steps. In the interleaved order these belong
        to one chunk at a time, if they are reduced once per group of micro-batches.
        """
        chunks: dict[int, list[tuple[tuple[int, int], int, bool]]] = {}
        for one, way in zip(weighed, kept):
            if way.gradients is not None:
                chunks.setdefault(one.group.model_chunk_id, []).append((one.span, one.gradient, way.alone))
        before = max((size for mine in chunks.values() for _, size, _ in mine), default=0)
        if self.rule.reduce_every == 1:
            return max((_peak_of_backward(tuple(mine), before) for mine in chunks.values()), default=0)
        parallel = self.workload.parallel
        one_chunk = parallel.order == "interleaved" and self.rule.reduce_every == parallel.microbatch_group_size
        stay = [sum(size for _, size, _ in mine) for mine in chunks.values()]
        in_flight = before if any(not alone for mine in chunks.values() for *_, alone in mine) else 0
        return (max(stay, default=0) if one_chunk else sum(stay)) + in_flight


def _first_changed(kept: list[Residency], changed: list[Residency], indices: list[int], number: int) -> list[Residency]:
    """``kept``, but ``changed`` for the first ``number`` of ``indices``."""
    chosen = {*indices[:number]}
    return [changed[index] if index in chosen else way for index, way in enumerate(kept)]


def relieved(one: OffloadCosts, way: Residency, relief: Relief) -> Residency:
    """``way`` with ``relief`` added; ``way`` itself if the group cannot be relieved any further in this way."""
    changes = {"shards": {"shard_on_host": True}, "alone": {"alone": True}}
    other = way._replace(**changes.get(relief, {"gradients": relief}))
    gone = other not in one.ways or (relief == "sharded" and way.gradients is not None)
    return way if gone else other


def _orders(weighed: list[OffloadCosts]) -> list[list[int]]:
    keys = [(one.group.bytes, -one.span[1], -index) for index, one in enumerate(weighed)]
    orders = [sorted(range(len(keys)), key=lambda i: (sign * keys[i][0], *keys[i][1:])) for sign in (-1, 1)]
    return orders if orders[0] != orders[1] else orders[:1]


@lru_cache(maxsize=512)
def _peak_of_backward(weighed: tuple[tuple[tuple[int, int], int, bool], ...], on_its_way: int) -> int:
    """Of groups given with their layers, the bytes of their gradients and whether these are alone."""
    there, peak = 0, on_its_way
    begin: dict[int, list[tuple[int, bool]]] = {}
    ends: dict[int, list[int]] = {}
    for (first, last), size, alone in weighed:
        begin.setdefault(last, []).append((size, alone))
        ends.setdefault(first, []).append(size)
    for layer in sorted({*begin, *ends}, reverse=True):
        for size, alone in begin.get(layer, ()):
            on_its_way = 0 if alone else on_its_way
            there += size
            peak = max(peak, there + on_its_way)
        for size in ends.get(layer, ()):
            there, on_its_way = there - size, size
    return peak


@lru_cache(maxsize=4)
def _fixed_bytes(workload: Workload) -> tuple[int, ...]:
    """Bytes of main parameters and optimizer states on the device of each pipeline rank. No grouping has fewer."""
    return tuple(least_of_states(workload, rank, single=True) for rank in range(workload.parallel.pp))
