"""Why a plan treats one group as it does: pass by pass, in sentences, with the figures that decided.

The alternatives are simulated here, by changing one thing of this group at a time. The passes themselves compare
complete plans, so they have no figures for a single group.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.passes import rest_states, size_step_slots, time_host_step
from megatron_ext.planner.reroute import rerouted
from megatron_ext.schedule.group_facts import can_step_early, gradient_bytes, uses_of_groups
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, memory_bill
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import require_route
from megatron_ext.workload.route import ALL_GATHER, ROUTE_KINDS, SHARD_GATHER, Route, kind_of

CUT, OFFLOAD, PLACE = "cut", "offload", "place"
Places = dict[str | None, str]
"""Descriptions of the places where something may rest, by place."""

SHOWN = 3
"""How many gathers of a group are listed: the first ones of an iteration."""

_PARENTHESES = re.compile(r" \([^()]*(\([^()]*\)[^()]*)*\)")


def explain(given: Candidate, group: str) -> str:
    """Text that follows one group of a plan through all passes.

    Args:
        given: a candidate from :func:`megatron_ext.planner.policies.planned`.
        group: the group's number, or the name of one of its parameters.

    Raises:
        InputError: there is no such group, or several groups have a parameter of this name.
    """
    return "\n".join(_Explained(given, _find(given.schedule, group)).lines())


def _find(schedule: Schedule, group: str) -> int:
    if group.isdecimal() and int(group) < len(schedule.groups):
        return int(group)
    found = [index for index, each in enumerate(schedule.groups) if group in each.parameters]
    if len(found) == 1:
        return found[0]
    message = f"no such group; expected a number, 0 to {len(schedule.groups) - 1}, or the name of a parameter"
    if found:
        message = f"is a parameter of groups {', '.join(map(str, found))}, of different chunks: give a number"
    raise InputError(message, field="--explain", value=group)


class _Explained:
    def __init__(self, given: Candidate, index: int):
        self.given, self.index, self.schedule = given, index, given.schedule
        self.workload, self.group = given.workload, given.schedule.groups[index]
        self.own = given.timing.among(self.group.ranks)
        self.result = simulate(given.workload, given.timing, given.schedule)
        self._us = f"{self.result.iteration_time_us / 1e3:.3f} ms per iteration"

    def lines(self) -> Iterator[str]:
        group, (first, last) = self.group, uses_of_groups([self.group], self.workload)[0]
        names = dict.fromkeys((group.parameters[0], group.parameters[-1]))
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        yield f"group {self.index}: {' to '.join(names)} ({len(group.parameters)} parameters)"
        cut = f"{layers} of chunk {group.model_chunk_id} on pipeline rank {group.pp_rank}, {_size(group.bytes)} whole, "
        cut += f"in shards among {group.ranks} ranks; the plan has {len(self.schedule.groups)} groups"
        for step, said in (
            (CUT, [cut]),
            (OFFLOAD, [self._gradient(), self._shard()]),
            (PLACE, [self._route(), *self._gathers()]),
            (size_step_slots.NAME, [self._slots()]),
            (rest_states.NAME, [self._states()]),
            (time_host_step.NAME, [self._early()]),
        ):
            own = [each for each in self.given.why if each.step == step]
            decided = [each.text for each in own if each.groups is None or self.index in each.groups]
            yield from (f"  {step}: {text}" for text in [*decided, *said] if text)

    def _as(self, group: Group, **changes) -> Schedule:
        groups = list(self.schedule.groups)
        groups[self.index] = replace(group, **changes)
        return replace(self.schedule, groups=tuple(groups))

    def _gathered(self, tried: Schedule) -> Schedule:
        """``tried``; where its shard rests elsewhere, gathers of the group begin there."""
        rests = tried.groups[self.index].shard_rests
        if rests == self.group.shard_rests or not any(kind_of(action.route).gathers for action in self._actions()):
            return tried
        return self._by(tried, SHARD_GATHER if rests == "host" else ALL_GATHER)

    def _by(self, schedule: Schedule, route: Route) -> Schedule:
        return rerouted(schedule, lambda action: route if action.group == self.index else action.route)

    def _tried(self, tried: Schedule) -> str:
        """The iteration time with another schedule, or why that schedule is not possible."""
        try:
            match(validate(tried), self.workload)
            for route in {action.route for action in tried.unshards}:
                require_route(self.given.timing, route)
            held, limit = max(host_bytes_of_nodes(tried, self.workload)), self.workload.limits.host_bytes
            if limit is not None and held > limit:
                return f"not possible, a node holds {held} bytes in host memory, {held - limit} bytes short"
            us = simulate(self.workload, self.given.timing, tried).iteration_time_us
        except InputError as error:
            return f"not possible, {_PARENTHESES.sub('', error.message)}"
        return f"{us / 1e3:.3f} ms per iteration"

    def _rests(self, what: str, kept: Places, now: str | None, others: dict[str | None, Schedule]) -> str:
        """Where a part of the group's state rests, and the iteration times with it there and elsewhere."""
        said = [f"{kept[other]}: {self._tried(schedule)}" for other, schedule in others.items() if other != now]
        return "; ".join([f"{what} rests {kept[now]}: {self._us}", *said])

    def _gradient(self) -> str:
        group, every = self.group, self.group.reduce_every
        kept = {None: "whole on the device", "sharded": "in shards on the device", "host": "in host memory"}
        others = {
            way: self._as(self.group, gradients=way, reduce_every=every if way else 1, alone=bool(way and group.alone))
            for way in (kept if self.workload.zero_stage > 1 else ())
        }
        said = f"its gradient, {_size(gradient_bytes(group, self.workload))} whole,"
        said = self._rests(said, kept, group.gradients, others)
        if group.gradients:
            when = "every backward" if every == 1 else f"every {every} backwards"
            said += f"; it is reduced after {when} of its chunk, in {self.own.reduce_us(group.bytes):.0f} us"
        held = memory_bill(self.schedule, self.workload)[group.pp_rank].memory.device_total_bytes
        limit = self.workload.limits.device_bytes
        allowed = "" if limit is None else f", and limits.device_bytes is {limit}"
        return f"{said}; the rank holds {held} bytes on its device at its peak{allowed}"

    def _shard(self) -> str:
        if self.workload.zero_stage < 3:
            return "its shard is a part of the whole on the device"
        other = None if self.group.shard_rests else "host"
        tried = self._gathered(self._as(self.group, shard_rests=other, algorithm=None))
        kept = {None: "on the device", "host": "in host memory"}
        said = f"its shard, {_size(self.group.bytes // self.group.ranks)},"
        return self._rests(said, kept, self.group.shard_rests, {other: tried})

    def _route(self) -> str:
        counts, alone = Counter(action.route for action in self._actions()), dict[Route, float]()
        for route in self._known():
            with contextlib.suppress(InputError):  # the size was not measured
                alone[route] = self.own.unshard_us(route, self.group.bytes)
        said = [f"{counts[route]} by {route} ({us:.0f} us)" for route, us in alone.items() if counts[route]]
        lines = [f"gathers per iteration: {', '.join(said) or 'none'}: {self._us}"]
        for route, us in alone.items():
            if counts.keys() != {route} and not kind_of(route).staged:
                lines.append(f"all by {route} ({us:.0f} us): {self._tried(self._by(self.schedule, route))}")
        return "; ".join([*lines, f"compute waits {self.result.group_exposed_us.get(self.index, 0.0):.0f} us for it"])

    def _known(self) -> list[Route]:
        """Routes that the table offers and that can bring the group from the place where its shard rests."""
        on_host = self.group.shard_rests == "host"
        kinds = [kind for kind in ROUTE_KINDS.values() if not kind.gathers or kind.shard_from_host == on_host]
        return [kind.name for kind in kinds if self.own.offers(kind.name)]

    def _actions(self):
        return [a for a in self.schedule.ranks[self.group.pp_rank].unshards if a.group == self.index]

    def _gathers(self) -> Iterator[str]:
        """When each gather is issued, needed and resharded."""
        rank = self.schedule.ranks[self.group.pp_rank]
        steps = [entry.step for entry in rank.steps]
        issued = [(i, a) for i, e in enumerate(rank.entries, -1) for a in e.unshard if a.group == self.index]
        freed = [(i, a) for i, e in enumerate(rank.steps) for a in e.reshard if a.group == self.index]
        for (index, action), end in list(zip_longest(issued, freed))[:SHOWN]:
            begins = "before the first step" if index < 0 else f"at step {steps[index]}{_at(action, 'before')}"
            need_by = steps[action.need_by if action.need_by >= 0 else index]
            ends = f"at step {steps[end[0]]}{_at(end[1], 'after')}" if end else "when the iteration ends"
            yield f"by {action.route}, issued {begins}, needed by step {need_by}, resharded {ends}"
        if len(issued) > SHOWN:
            yield f"and {len(issued) - SHOWN} more"

    def _slots(self) -> str:
        if not self.workload.optimizer.on_host:
            return ""
        if self.group.states_rest is not None:
            return "none for this group: its states are not in host memory"
        return "its gradient passes through slots" if self.schedule.step_slots else "Megatron copies its gradient"

    def _states(self) -> str:
        if not self.workload.optimizer.on_host or self.workload.optimizer.delayed:
            return ""
        kept = {None: "in host memory", "nvme": "on the drive", "device": "on the device"}
        others = {
            None: self._as(self.group, states_rest=None),
            "device": self._gathered(self._as(rest_states.moved_group(self.group))),
        }
        return self._rests("its optimizer state", kept, self.group.states_rest, others)

    def _early(self) -> str:
        if self.schedule.rollback_bytes is None:
            return ""
        if can_step_early(self.group, self.workload):
            return "this group is stepped as soon as its gradient is reduced"
        return "this group waits: other ranks add to its gradient, or the device steps it"


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _at(action, side: str) -> str:
    return f", {side} layer {action.at}" if action.at >= 0 else ""
