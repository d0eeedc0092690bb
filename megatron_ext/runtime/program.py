"""Compile one rank's part of a schedule into lists of callables.

[Note: No decisions on the hot path]
Everything that a schedule can say is turned into closures before the first step. At a step only a
(mostly empty) tuple of functions is called. Dictionary look-ups and tests per parameter cost
about 1.5 us each in Python; an empty tuple costs nothing measurable.

[Note: Places inside a step]
A chunk with n layers has n - 1 boundaries, numbered by the layer behind them. In a forward step
boundary b lies between the end of layer b - 1 and the begin of layer b; in a backward step,
where layers run in descending order, between the end of layer b and the begin of layer b - 1.
An action that belongs to a layer runs at the boundary before or after the layer, or, at the ends of
the chunk, when the step begins or ends. Layers without actions get no hook.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import Clock, RankGroup
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.routes import Route
from megatron_ext.schedule.footprint import actions_in_order
from megatron_ext.schedule.user_defined_schedule import Rank, Reshard, Schedule
from megatron_ext.workload.step import Step

Action = Callable[[], None]


class Layers(Protocol):
    """The layers of this rank's chunks, as the compiler uses them."""

    def uses(self, group_index: int) -> tuple[int, int]:
        """The first and the last layer of its chunk that use a group."""
        ...

    def num_layers(self, model_chunk_id: int) -> int: ...

    def block(self, model_chunk_id: int, layer: int) -> tuple[int, int]:
        """The first and the last layer that are recomputed together with ``layer``: the backward of these layers begins
        at the last one and ends at the first one."""
        ...

    def arm(
        self, model_chunk_id: int, boundary: int, forward: tuple[Action, ...], backward: tuple[Action, ...]
    ) -> Action:
        """A function to call when a forward step begins. It makes ``forward`` run at that boundary of
        this step, and ``backward`` at the same boundary of the backward of the same micro-batch."""
        ...


class Program(NamedTuple):
    """One iteration of one rank, sorted by the hooks that call it.

    There is no hook after a forward. Actions that the schedule places after a forward run in the hook of the next step,
    before the actions of that step. The last step is a backward.

    Attributes:
        start: runs when fresh parameters are published.
        forwards: chunk of each forward, and the actions before it.
        backwards: chunk of each backward, the actions before it, and the actions after it.
    """

    start: tuple[Action, ...] = ()
    forwards: tuple[tuple[int, tuple[Action, ...]], ...] = ()
    backwards: tuple[tuple[int, tuple[Action, ...], tuple[Action, ...]], ...] = ()


class PlacedStep(NamedTuple):
    """Actions of one step by place, see [Note: Places inside a step]."""

    step: Step
    chunk: int
    begin: list[Action]
    at: dict[int, list[Action]]
    end: list[Action]

    def in_order(self) -> list[Action]:
        """All actions, in the order in which layers run."""
        boundaries = sorted(self.at, reverse=self.step.kind == "B")
        return [*self.begin, *(action for boundary in boundaries for action in self.at[boundary]), *self.end]


class PlacedActions(NamedTuple):
    """The actions that run when fresh parameters are published, and those of each step."""

    start: list[Action]
    steps: list[PlacedStep]


def compile_program(placed: PlacedActions, layers: Layers, poll: Action | None = None) -> Program:
    """Turn actions into calls.

    Args:
        placed: see :func:`place_actions`.
        layers: this rank's layers.
        poll: called before the actions between two layers; issues what threads have made ready. None: nothing is.
    """
    start, steps = placed
    first = () if poll is None else (poll,)
    backward_of = {(place.step.stage, place.step.microbatch): place.at for place in steps if place.step.kind == "B"}
    forwards, backwards, carried = [], [], ()
    for step, chunk, begin, at_boundaries, end in steps:
        before = [*carried, *begin]
        if step.kind == "F":
            backward = backward_of[step.stage, step.microbatch]
            for boundary in sorted({*at_boundaries, *backward}):
                there = (at.get(boundary) for at in (at_boundaries, backward))
                own, later = ((*first, *actions) if actions else () for actions in there)
                before.append(layers.arm(chunk, boundary, own, later))
            forwards.append((chunk, tuple(before)))
            carried = tuple(end)
        else:
            backwards.append((chunk, tuple(before), tuple(end)))
            carried = ()
    return Program(tuple(start), tuple(forwards), tuple(backwards))


def place_actions(
    schedule: Schedule,
    rank: Rank,
    groups: dict[int, RankGroup],
    routes: dict[str, Route],
    clock: Clock,
    layers: Layers,
    recorder: Recorder = NOTHING,
    check_uses: bool = False,
    reducer: Reducer | None = None,
) -> PlacedActions:
    """Place the actions of a validated schedule.

    Args:
        schedule, rank: the schedule and the entry of this pipeline rank.
        groups: this rank's groups by their index in the schedule.
        routes: route objects by name, see :mod:`megatron_ext.runtime.routes`; also the gpu route's
            algorithms by their names.
        clock: the version that every gather must bring.
        layers: this rank's layers.
        recorder: where issues and waits are recorded.
        check_uses: check state and version of every group at every layer that uses it.
        reducer: handles the gradients that come and go; None if all gradients stay whole.
    """
    compiler = _Compiler(schedule, groups, routes, clock, layers, recorder, reducer)
    waits = compiler.waits_by_step(rank)
    start = [*map(compiler.stage_in, rank.start.stage_in), *map(compiler.unshard, rank.start.unshard)]
    return PlacedActions(
        start,
        [
            compiler.place(Step.parse(entry.step), entry, waits.get(index, ()), check_uses)
            for index, entry in enumerate(rank.steps)
        ],
    )


class _Compiler:
    def __init__(self, schedule: Schedule, groups, routes, clock: Clock, layers, recorder, reducer: Reducer | None):
        self.schedule, self.groups, self.routes, self.layers = schedule, groups, routes, layers
        self.clock, self.recorder, self.reducer = clock, recorder, reducer
        self._backwards: Counter[int] = Counter()  # of each chunk so far

    def waits_by_step(self, rank: Rank) -> dict[int, list[int]]:
        """Groups that have to be whole at each step, in the order of their issue."""
        waits: dict[int, list[int]] = {}
        for action in rank.start.unshard:
            waits.setdefault(action.need_by, []).append(action.group)
        for index, entry in enumerate(rank.steps):
            for action in entry.unshard:
                waits.setdefault(index if action.need_by < 0 else action.need_by, []).append(action.group)
        return waits

    def place(self, step: Step, entry, waits, check_uses: bool) -> PlacedStep:
        """Place the actions of the next step, in this order: reduces, frees, issues, waits, allocations."""
        chunk = step.model_chunk_id(self.schedule.parallel.pp)
        place = PlacedStep(step, chunk, [*map(self.stage_in, entry.stage_in)], {}, [])
        reduces, allocations = (), ()
        if step.kind == "B" and self.reducer is not None:
            reduces, allocations = self.gradients(chunk, self.reducer)
        for layer, action in reduces:
            self._behind(place, layer).append(action)
        for action in actions_in_order(entry):
            if isinstance(action, Reshard):
                self._behind(place, action.at).append(self.reshard(action))
            else:
                self._before(place, action.at).append(self.unshard(action))
        for index in waits:
            # Not the whole step waits for the group, but the first layer that uses it.
            first, last = self.layers.uses(index)
            own = self.schedule.groups[index].model_chunk_id == chunk
            layer = -1
            if own:
                layer = first if step.kind == "F" else self.layers.block(chunk, last)[1]
            self._before(place, layer).append(self.wait(index))
        for layer, action in allocations:
            self._before(place, layer).append(action)
        if check_uses:
            for index, group in self.groups.items():
                if self.schedule.groups[index].model_chunk_id == chunk:
                    for layer in range(self.layers.uses(index)[0], self.layers.uses(index)[1] + 1):
                        if step.kind == "B":
                            layer = self.layers.block(chunk, layer)[1]
                        self._before(place, layer).append(partial(group.check_usable, self.clock))
        return place

    def gradients(self, chunk: int, reducer: Reducer) -> tuple[list[tuple[int, Action]], list[tuple[int, Action]]]:
        """Reduces in the next backward of ``chunk``, each with the layer after whose backward it is made, and
        allocations, each with the layer before whose backward it is made, in the order in which the layers run. Every
        gradient is allocated before the backward of its group's last layer and reduced after that of its first."""
        self._backwards[chunk] += 1
        visit, visits = self._backwards[chunk], self.schedule.parallel.num_microbatches
        reduces, allocations = [], []
        for index, gradient in reducer.gradients.items():
            group, (first, last) = self.schedule.groups[index], self.layers.uses(index)
            if group.model_chunk_id != chunk:
                continue
            if (visit - 1) % group.reduce_every == 0:
                begins = self.layers.block(chunk, last)[1]
                allocations.append((begins, partial(reducer.allocate, gradient, group.alone)))
            if visit % group.reduce_every == 0 or visit == visits:
                ends = self.layers.block(chunk, first)[0]
                reduces.append((ends, partial(reducer.reduce, gradient, visit == visits)))
        for actions in (reduces, allocations):
            actions.sort(key=lambda one: -one[0])
        return reduces, allocations

    def _before(self, place: PlacedStep, layer: int) -> list[Action]:
        """The list of actions just before ``layer`` computes (-1: at the begin of the step)."""
        return self._at(place, layer + 1 if place.step.kind == "B" else layer, place.begin)

    def _behind(self, place: PlacedStep, layer: int) -> list[Action]:
        """The list of actions just after ``layer`` has computed (-1: at the end of the step)."""
        return self._at(place, layer + 1 if place.step.kind == "F" else layer, place.end)

    def _at(self, place: PlacedStep, boundary: int, edge: list[Action]) -> list[Action]:
        """The list of actions at ``boundary``; ``edge`` if the chunk has no such boundary."""
        inside = 0 < boundary < self.layers.num_layers(place.chunk)
        return place.at.setdefault(boundary, []) if inside else edge

    def stage_in(self, action) -> Action:
        stage = partial(self.routes["nvme"].stage_in, self.groups[action.group], action.slot)
        return self._recorded("issue", f"stage_in {action.group} {action.slot}", stage)

    def unshard(self, action) -> Action:
        issue = self.routes[self.schedule.groups[action.group].algorithm_by(action.route) or action.route].issue
        return self._recorded(
            "issue",
            f"unshard {action.group} {action.route}",
            self.groups[action.group].unshard_action(issue, self.clock),
        )

    def wait(self, index: int) -> Action:
        return self._recorded("wait", f"wait {index}", self.groups[index].wait_action(self.clock))

    def reshard(self, action) -> Action:
        return self._recorded("issue", f"reshard {action.group}", self.groups[action.group].reshard)

    def _recorded(self, lane: str, name: str, function: Action) -> Action:
        return function if self.recorder is NOTHING else self.recorder.timed(lane, name, function)
