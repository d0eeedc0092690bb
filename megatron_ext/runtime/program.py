"""Compile one rank's part of a schedule into lists of callables.

[Note: No decisions on the hot path]
Everything that a schedule can say is turned into closures before the first step: what is left
to do at a step is to call a (mostly empty) tuple of functions. Dictionary look-ups and tests
per parameter cost about 1.5 us each in Python; an empty tuple costs nothing that can be seen.
"""

from typing import Callable, NamedTuple

from megatron_ext.runtime.group import Clock, Group, ScheduleError
from megatron_ext.schedule.model import Rank, Schedule
from megatron_ext.workload.step import Step

Action = Callable[[], None]


class StepProgram(NamedTuple):
    """What to call at one step: ``before`` its compute, ``after`` it."""

    step: Step
    chunk: int
    before: tuple[Action, ...]
    after: tuple[Action, ...]


class Program(NamedTuple):
    """One iteration of one rank: ``start`` runs when fresh parameters are published."""

    start: tuple[Action, ...]
    steps: tuple[StepProgram, ...]


def compile_program(schedule: Schedule, rank: Rank, groups: dict[int, Group], routes: dict[str, object], clock: Clock, layers, recorder=None, skip_group: int = -1) -> Program:
    """Turn a validated schedule into calls.

    Args:
        schedule, rank: the schedule and the entry of this pipeline rank.
        groups: this rank's groups by their index in the schedule.
        routes: route objects by name; see :mod:`megatron_ext.runtime.routes`.
        clock: the version that every gather must bring.
        layers: ``layers.arm(model_chunk_id, layer, actions) -> Action`` gives a function that
            makes ``actions`` run once, just before that layer computes next; and
            ``layers.first_layer(group_index) -> int`` the first layer that uses a group.
        recorder: where issues and waits are recorded, or None.
        skip_group: negative control; this group's unshard and wait are left out.
    """
    compiler = _Compiler(schedule, groups, routes, clock, recorder, skip_group)
    waits = compiler.waits_by_step(rank)
    start = tuple(compiler.unshard(action) for action in rank.start.unshard if action.group != skip_group)
    steps = []
    for index, entry in enumerate(rank.steps):
        step = Step.parse(entry.step)
        chunk = step.model_chunk_id(schedule.parallel.pp)
        before = [compiler.unshard(action) for action in entry.unshard if action.group != skip_group]
        by_layer: dict[int, list[Action]] = {}
        for group_index in waits.get(index, ()):
            wait = compiler.wait(group_index)
            if step.kind == "F" and schedule.groups[group_index].model_chunk_id == chunk:
                # The layer that uses the group first waits for it, not the whole step.
                by_layer.setdefault(layers.first_layer(group_index), []).append(wait)
            else:
                before.append(wait)
        for layer, actions in sorted(by_layer.items()):
            before.append(layers.arm(chunk, layer, tuple(actions)))
        after = [compiler.reshard(action) for action in entry.reshard]
        steps.append(StepProgram(step, chunk, tuple(before), tuple(after)))
    return Program(start, tuple(steps))


class _Compiler:
    def __init__(self, schedule: Schedule, groups, routes, clock: Clock, recorder, skip_group: int):
        self.schedule, self.groups, self.routes = schedule, groups, routes
        self.clock, self.recorder, self.skip_group = clock, recorder, skip_group

    def waits_by_step(self, rank: Rank) -> dict[int, list[int]]:
        """Groups that become whole at each step, in the order of their issue."""
        waits: dict[int, list[int]] = {}
        for action in rank.start.unshard:
            waits.setdefault(action.need_by, []).append(action.group)
        for index, entry in enumerate(rank.steps):
            for action in entry.unshard:
                waits.setdefault(index if action.need_by < 0 else action.need_by, []).append(action.group)
        return {index: [g for g in found if g != self.skip_group] for index, found in waits.items()}

    def unshard(self, action) -> Action:
        group, clock = self.groups[action.group], self.clock
        issue = self.routes[action.route].issue

        def unshard() -> None:
            group.begin_unshard()
            group.version = clock.version
            group.handle = issue(group)

        return self._recorded("issue", f"unshard {group.index} {action.route}", unshard)

    def wait(self, index: int) -> Action:
        group, clock = self.groups[index], self.clock

        def wait() -> None:
            handle = group.handle
            if handle is None:
                raise ScheduleError(f"{group} is waited for but was not unsharded")
            handle.wait()
            group.end_unshard(clock)

        return self._recorded("wait", f"wait {index}", wait)

    def reshard(self, action) -> Action:
        group = self.groups[action.group]

        def reshard() -> None:
            raise ScheduleError(f"{group} cannot be freed: zero stage 1 keeps every group")

        return reshard

    def _recorded(self, lane: str, name: str, function: Action) -> Action:
        return function if self.recorder is None else self.recorder.timed(lane, name, function)
