"""The plan that holds the fewest bytes, for the case that no rule gives a plan that fits. CP-SAT decides what every
group keeps where.

[Note: What is solved]
Groups are layers, or large parameters of layers and the rest of these layers. At zero stage 3 a group is whole only
while its layer computes. Whole gradients that come and go are allocated one at a time. Therefore what a rank holds
while a layer computes is a sum over its groups. Each group can be kept in a few ways: its gradients whole, in shards or
in host memory, and its shard on the device or in host memory. The model has one inequality for every layer of every
rank, and one for every node. If the model has no solution, nothing that is cut this way fits, and the refusal is true.

This much is proven. The host memory that the optimizer takes in addition is only a bound. If host memory is short, the
solver may also stop before its answer is proven. The plan that takes the least host memory is then the best of those
that were found.

Most refusals need no solver. The bytes that a rank holds at one moment are a sum over groups, so the sum of each
group's minimum is a lower bound. Mostly this bound is reached by keeping every group in the way that leaves the fewest
bytes on the device between its uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from math import inf
from typing import Literal, NamedTuple, NoReturn

from msgspec.structs import replace
from ortools.sat.python import cp_model

from megatron_ext.bounds.host_room import pinned_limit
from megatron_ext.bounds.memory_headroom import what_helps
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory, kinds_text
from megatron_ext.planner.effort import judged_us
from megatron_ext.planner.finish import those_that_can
from megatron_ext.planner.passes.cut_groups import by_parameter
from megatron_ext.planner.passes.offload_groups import OffloadCosts, Offloader, Relief, Residency, Rule
from megatron_ext.planner.problem import Problem
from megatron_ext.planner.reroute import rerouted
from megatron_ext.planner.states_on_drive import with_states_on_drive
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.bill_by_step import activations
from megatron_ext.schedule.footprint import pinned_need
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import keeps_device_bytes, memory_bill, on_nodes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.route import HOST_COPY, Route, kind_of
from megatron_ext.workload.state_layout import GRADIENT_SLOTS
from megatron_ext.workload.workload import Chunk, Limits, Parameter, Workload

MOST_BYTES = 1 << 50

WORK = 2.0
"""Work on one model, in CP-SAT's own measure, which is deterministic."""

Aim = Literal["time", "device", "host"]


class Way(NamedTuple):
    """One way to keep a group.

    Attributes:
        throughout, around: bytes on the device during the whole iteration, and around the group's layers.
        buffer: bytes of its buffers on the device.
        rounding: bytes of the buffer in which the optimizer on the device rounds parameters.
        brought: bytes of the gradient that is brought to the optimizer on the device.
        host, pinned: bytes in host memory without ``slots``, and how many of these are pinned.
        slots: bytes of the slots in host memory through which its gradient comes.
        cost_us: microseconds for which it occupies links.
    """

    kept: Residency
    route: Route
    throughout: int
    around: int
    buffer: int
    rounding: int
    brought: int
    host: int
    pinned: int
    slots: int
    cost_us: float


class LayerMoment(NamedTuple):
    """One layer computing. ``before``: chunks whose backwards ran before, the most recent first, each chunk once."""

    chunk: int
    backward: bool
    layer: int
    before: tuple[int, ...]


def least_plan(problem: Problem, reliefs: frozenset[Relief]) -> Schedule:
    """The fastest of the plans that hold the fewest bytes and keep ``limits.device_bytes`` and the limits of host
    memory.

    Raises:
        InputError: nothing that is cut this way fits; the message has the least that the rank then holds and how much
            is missing. Or no plan was found that fits into a node's host memory; the message has what the plan that
            takes the least holds there.
    """
    workload = problem.workload
    models = [_ResidencyModel(problem, reliefs, cut) for cut in (layer_buckets, _parameters)]
    for model in models:
        found = model.plan()
        if found is not None:
            return found
    if workload.limits.host_bytes is not None and models[-1].least[0] <= (workload.limits.device_bytes or 0):
        least = models[-1].solved("host", replace(workload.limits, host_bytes=None))
        if least is not None and keeps_device_bytes(with_states_on_drive(least, workload), workload):
            return models[-1].finished(least)
    _refuse(workload, models, what_helps(workload, relieved="shards" in reliefs))


def _parameters(chunk: Chunk) -> list[list[Parameter]]:
    return [part for bucket in layer_buckets(chunk) for part in by_parameter(bucket)]


def _refuse(workload: Workload, models: Sequence[_ResidencyModel], advice: str) -> NoReturn:
    """Raise an InputError that says why no model has a plan."""
    limits, limit = workload.limits, workload.limits.device_bytes
    assert limit is not None
    found = [(need, schedule) for need, schedule in (model.least for model in models) if schedule is not None]
    names = ["device_bytes"]
    if found and min(need for need, _ in found) <= limit:  # but limits of host memory may leave too much on the device
        names = ["pinned_host_bytes", "host_bytes", "device_bytes"]
        solved = [model.solved("device", limits) for model in models]
        found = [(_fullest(one, workload)[1].device_total_bytes, one) for one in solved if one is not None]
    if not found:
        raise InputError("cannot fit: no route can bring every group within the limits", field="limits")
    need, schedule = min(found, key=lambda item: item[0])
    if need <= limit:
        _checked(schedule, workload)  # raises if anything else than the device is short
        raise InputError("cannot fit: no plan was found that keeps the limits", field="limits")
    rank, memory = _fullest(schedule, workload)
    name = next(name for name in names if getattr(limits, name) is not None)
    within, short_of = "within it ", f"more than limits.device_bytes = {limit}"
    if name == "device_bytes":
        within, short_of = "", "short"
    raise InputError(
        f"cannot fit: {within}pipeline rank {rank} holds at least {need} bytes on its device "
        f"({kinds_text(memory.device_bytes)}) by groups of layers or large parameters, {need - limit} bytes "
        f"{short_of}{advice}",
        field=f"limits.{name}",
        value=getattr(limits, name),
    )


def _checked(found: Schedule, workload: Workload) -> Schedule:
    """Return ``found``. Raises InputError if it does not keep a limit."""
    match(with_states_on_drive(found, workload), workload)
    return found


def _fullest(schedule: Schedule, workload: Workload) -> tuple[int, RankMemory]:
    """The rank that holds most on its device, and its memory bill."""
    bills = enumerate(bill.memory for bill in memory_bill(schedule, workload))
    return max(bills, key=lambda item: item[1].device_total_bytes)


class _ResidencyModel:
    """All groups of a workload, cut by one rule, and the ways to keep each group.

    Args:
        cut: the rule that makes the groups of a chunk.
    """

    def __init__(self, problem: Problem, reliefs, cut):
        self.workload, self.timing, self.routes, *_ = workload, timing, *_ = problem
        first = workload.with_limits(whole_parameter_bytes=1)  # whole only just before its layer computes
        self.streams = [replace(stock_schedule(work, cut), limits=workload.limits) for work in (workload, first)]
        groups = self.streams[0].groups
        self.offloader = Offloader(workload, Rule(None, tuple(reliefs)), timing)
        self.ranks = list(self.offloader.by_rank(groups))
        self.ways = {index: self._ways(one) for _, indices, own in self.ranks for index, one in zip(indices, own)}

    def _ways(self, one: OffloadCosts) -> list[Way]:
        dp, size = one.group.ranks, one.group.bytes
        ways, kinds = [], [kind_of(route) for route in self.routes if not kind_of(route).staged]
        for kept, cost in one.ways.items():
            possible = [k for k in kinds if not k.gathers or k.shard_from_host == kept.shard_on_host]
            if kept.alone != (kept.gradients is not None) or not possible or cost == inf:
                continue
            kind = max(possible, key=lambda kind: kind.gathers)
            host, pinned = self.offloader.on_host([one], [kept])
            throughout, brought, *_ = one.held[kept]
            buffer = kind.buffer_bytes(size, dp)
            around = one.gradient if kept.gradients is not None else 0
            copies = size // self.offloader.sharing[dp] if kind.reads_host_copy and not kept.shard_on_host else 0
            slots = GRADIENT_SLOTS * (one.gradient // dp) if kept.gradients == "host" else 0
            rounding = one.rounding if kept.shard_on_host else 0
            bytes_there = throughout, around, buffer, rounding, brought
            ways.append(Way(kept, kind.name, *bytes_there, host - slots + copies, pinned + copies, slots, cost))
        return ways

    @cached_property
    def least(self) -> tuple[float, Schedule | None]:
        """The least bytes that the fullest rank holds on its device, whatever room the host has; and the plan that
        keeps every group in the way that leaves the fewest bytes on the device between its uses. Mostly this plan holds
        no more than the least. Infinite and None if there is a group that can be kept in no way.

        For given buffers, the bytes at one moment are at least the sum of what each group needs at that moment.
        """
        least, chosen = 0.0, dict[int, Way]()
        for rank, indices, _ in self.ranks:
            past = []  # size, and by group that comes and goes: the number of its whole gradients
            for moment, size in self._moments(rank).items():
                around = {index: 1 if moment.backward else 0 for index, _ in self._here(rank, moment)}
                index, reduced = next(self._events(rank, moment), (0, False))
                if reduced:
                    around[index] = around.get(index, 0) + 1
                past.append((size, around))
            every = [way for index in indices for way in self.ways[index]]
            caps = product({0, *(way.buffer for way in every)}, {0, *(way.rounding for way in every)})
            held, ways = min((self._least_of_rank(rank, past, *cap) for cap in caps), key=lambda item: item[0])
            least, chosen = max(least, held), chosen | ways
        if least == inf:
            return inf, None
        return least, self._schedule([chosen[index] for index in range(len(chosen))])

    def _least_of_rank(self, rank: int, past, buffer: int, rounding: int) -> tuple[float, dict[int, Way]]:
        """:attr:`least` for one rank whose buffers have these bytes."""
        caps = lambda way: way.buffer <= buffer and way.rounding <= rounding
        usable = {index: [*filter(caps, self.ways[index])] for index in self.ranks[rank][1]}
        if not all(usable.values()):
            return inf, {}
        found = {i: min(own, key=lambda w: (w.throughout, w.around, w.brought, w.cost_us)) for i, own in usable.items()}
        resting = sum(way.throughout for way in found.values())
        held = self._whole(rank) + sum(min(way.throughout + way.brought for way in own) for own in usable.values())
        for size, around in past:
            needs = ((found[i], min(w.throughout + n * w.around for w in usable[i])) for i, n in around.items())
            held = max(held, size + resting + sum(need - way.throughout for way, need in needs))
        return self.offloader.fixed[rank] + buffer + rounding + held, found

    def _whole(self, rank: int) -> int:
        """Bytes of parameters that are whole during the whole iteration."""
        return 0 if self.workload.zero_stage == 3 else sum(one.group.bytes for one in self.ranks[rank][2])

    def _here(self, rank: int, moment: LayerMoment) -> list[tuple[int, OffloadCosts]]:
        """The groups that the layer of ``moment`` uses, with their indices."""
        _, indices, weighed = self.ranks[rank]
        here = ((i, one) for i, one in zip(indices, weighed) if one.group.model_chunk_id == moment.chunk)
        return [(i, one) for i, one in here if one.span[0] <= moment.layer <= one.span[1]]

    def plan(self) -> Schedule | None:
        """The fastest plan that keeps all limits; None if this model has no such plan."""
        limits = self.workload.limits
        if self.least[0] > (limits.device_bytes or 0):
            return None
        found = self.solved("time", limits) or self.least[1]
        with suppress(InputError):
            return None if found is None else self.finished(_checked(found, self.workload))

    def solved(self, aim: Aim, limits: Limits) -> Schedule | None:
        """The plan that minimises ``aim``: the time of links, the bytes of the rank that holds most on its device
        (without regard to ``limits.device_bytes``), or the bytes of the node that holds most. None if no plan keeps
        ``limits``."""
        model = cp_model.CpModel()
        chosen = {index: [model.new_bool_var("") for _ in ways] for index, ways in self.ways.items()}
        for flags in chosen.values():
            model.add_exactly_one(flags)
        most = model.new_int_var(0, MOST_BYTES, "")
        device_limit = most if aim == "device" else limits.device_bytes
        for held in self._device(model, chosen):
            model.add(held <= device_limit)
        host, pinned = (self._nodes(model, chosen, kind) for kind in ("host", "pinned"))
        for held, by_optimizer in zip(host, self.offloader.optimizer):
            if aim == "host":
                model.add(held + by_optimizer <= most)
            elif limits.host_bytes is not None:
                model.add(held + by_optimizer <= limits.host_bytes)
        for held in pinned if limits.pinned_host_bytes is not None else ():
            model.add(held <= limits.pinned_host_bytes)
        model.minimize(self._sum(chosen, chosen, "cost_us") if aim == "time" else most)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
        solver.parameters.max_deterministic_time = WORK
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        ways = [
            next(way for way, flag in zip(self.ways[i], chosen[i]) if solver.value(flag)) for i in range(len(chosen))
        ]
        return self._schedule(ways)

    def _sum(self, chosen, indices: Iterable[int], name: str):
        return sum(round(getattr(way, name)) * flag for i in indices for way, flag in zip(self.ways[i], chosen[i]))

    def _most(self, model: cp_model.CpModel, chosen, indices: Iterable[int], name: str):
        """The largest of the bytes that these groups need one after the other."""
        most = model.new_int_var(0, MOST_BYTES, "")
        for index in indices:
            for way, flag in zip(self.ways[index], chosen[index]):
                if getattr(way, name):
                    model.add(most >= getattr(way, name) * flag)
        return most

    def _nodes(self, model: cp_model.CpModel, chosen, name: Literal["host", "pinned"]) -> list:
        """The bytes that the ranks of each node hold in host memory."""
        ranks = range(len(self.ranks))
        counts = [on_nodes(self.workload, [int(rank == other) for other in ranks]) for rank in ranks]
        sums = [self._sum(chosen, indices, name) for _, indices, _ in self.ranks]
        if name == "host":
            sums = [held + self._most(model, chosen, own, "slots") for held, (_, own, _) in zip(sums, self.ranks)]
        return [sum(count[node] * held for count, held in zip(counts, sums)) for node in range(len(counts[0]))]

    def _device(self, model: cp_model.CpModel, chosen) -> Iterator:
        """The bytes that a rank holds on its device while each of its layers computes, and while its optimizer
        steps."""
        for rank, indices, _ in self.ranks:
            buffers = sum(self._most(model, chosen, indices, name) for name in ("buffer", "rounding"))
            resting = self.offloader.fixed[rank] + self._sum(chosen, indices, "throughout") + buffers
            yield resting + self._whole(rank) + self._sum(chosen, indices, "brought")
            known: dict[tuple, tuple] = {}
            for moment, size in self._moments(rank).items():
                here = [index for index, _ in self._here(rank, moment)] if moment.backward else []
                around = self._sum(chosen, here, "around")
                yield resting + size + around + self._on_its_way(model, chosen, rank, moment, known)

    def _moments(self, rank: int) -> dict[LayerMoment, int]:
        """Every layer of every step (equal ones once), and the most bytes of whole parameters and activations at that
        layer."""
        found: dict[LayerMoment, int] = {}
        before: tuple[int, ...] = ()
        for chunk, backward, saved in activations(self.workload, rank):
            for layer, size in enumerate(saved):
                moment = LayerMoment(chunk, backward, layer, before)
                found[moment] = max(found.get(moment, 0), size)
            before = (chunk, *(other for other in before if other != chunk)) if backward else before
        used = lambda moment: self._whole(rank) or sum(one.group.bytes for _, one in self._here(rank, moment))
        return {moment: size + used(moment) for moment, size in found.items()}

    def _on_its_way(self, model: cp_model.CpModel, chosen, rank: int, moment: LayerMoment, known: dict[tuple, tuple]):
        """The gradient that was reduced last, if no other has been allocated since then: whole gradients are allocated
        one at a time. ``known`` holds the variables that moments share, because most of their past is the same."""
        _, indices, weighed = self.ranks[rank]
        sizes = {index: one.gradient for index, one in zip(indices, weighed)}
        latest, most, number = 0, 0, 0  # a variable, its largest value, and a number that only this variable has
        for index, reduced in reversed(list(self._events(rank, moment))):  # the earliest first
            if not reduced and most == 0:
                continue  # nothing was reduced before
            key = index, reduced, number
            if key not in known:
                comes = sum(flag for way, flag in zip(self.ways[index], chosen[index]) if way.around)
                size = sizes[index] if reduced else 0
                least = model.new_int_var(0, max(size, most), "")
                model.add(least >= size * comes)
                model.add(least >= latest - most * comes)
                known[key] = least, max(size, most), len(known) + 1
            latest, most, number = known[key]
        return latest

    def _events(self, rank: int, moment: LayerMoment) -> Iterator[tuple[int, bool]]:
        """Events of gradients that come and go, before a moment, the latest first: the group, and whether its gradient
        was reduced (or else allocated)."""
        _, indices, weighed = self.ranks[rank]
        passed = [(chunk, 0, 0) for chunk in moment.before]  # with the first layers that have allocated, and reduced
        if moment.backward:
            passed.insert(0, (moment.chunk, moment.layer, moment.layer + 1))
        for chunk, allocated, reduced in passed:
            own = [(i, one) for i, one in zip(indices, weighed) if one.group.model_chunk_id == chunk][::-1]
            for layer in range(allocated, self.workload.chunk(rank, chunk).num_layers):
                if layer >= reduced:
                    yield from ((i, True) for i, one in own if one.span[0] == layer)
                yield from ((i, False) for i, one in own if one.span[1] == layer)

    def _schedule(self, ways: Sequence[Way]) -> Schedule:
        stream = self.streams[1]
        groups = tuple(self.offloader.kept_as(group, way.kept) for group, way in zip(stream.groups, ways))
        return validate(rerouted(replace(stream, groups=groups), lambda action: ways[action.group].route))

    def finished(self, found: Schedule) -> Schedule:
        """The fastest of up to four variants of ``found`` that keep the limits. Each layer is gathered just before it
        computes or while the previous layer computes. Groups that come by ``cpu_shard`` keep that route, or come by
        host copies. Raises InputError if none keeps the limits."""
        routes: dict[int, Route] = {action.group: action.route for action in found.unshards}
        ways = [routes]
        if HOST_COPY in self.routes:
            copied = {i: HOST_COPY if kind_of(route).shard_from_host else route for i, route in routes.items()}
            limit, hosted = pinned_limit(self.workload, found.groups), {i for i in copied if copied[i] == HOST_COPY}
            if limit is None or max(pinned_need(self.workload, found.groups, hosted)) <= limit:
                ways.append(copied)
        tried = [
            rerouted(replace(stream, groups=found.groups), lambda action, way=way: way[action.group])
            for stream in self.streams
            for way in ways
        ]
        kept = those_that_can(tried, lambda schedule: _checked(schedule, self.workload))
        return min(kept, key=lambda schedule: judged_us(self.workload, self.timing, schedule))
