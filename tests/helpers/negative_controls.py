"""Negative controls: single safeguards of the product that are taken away, by wrapping what it does; see faults.py."""

import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

Wrapper = Callable[[Callable], Any]
"""From what is there to what is put in its place."""


def before(pause: Callable[..., None]) -> Wrapper:
    """``pause(self, *arguments)`` before the method."""

    def wrap(method):
        @functools.wraps(method)
        def call(self, *arguments):
            pause(self, *arguments)
            return method(self, *arguments)

        return call

    return wrap


class _Published:
    """Flags of host copies, all of which are said to be published."""

    def __init__(self, flags):
        self._flags = flags

    def __getattr__(self, name: str):
        return getattr(self._flags, name)

    def is_published(self, *arguments) -> bool:
        return True


def no_wait(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.gradients import Reducer
    from megatron_ext.runtime.routes.drive_copy import DriveCopy
    from megatron_ext.runtime.routes.host_copy import HostCopy

    def at_once(issue):
        def call(self, group):
            arrival = self.arrival(group.index)
            self._copy(group, arrival)
            return arrival

        return call

    def unasked(read):
        def call(self, *arguments):
            if not isinstance(self.flags, _Published):
                self.flags = _Published(self.flags)
            return read(self, *arguments)

        return call

    def early(finish_reduce):
        def call(self):
            flying = self._in_flight
            self.injected_part = None
            if flying is not None and flying[0].index not in self.on_host:
                self.injected_part = flying[0].part.clone()
            finish_reduce(self)

        return call

    def added(add):
        return lambda self, gradient, part: add(
            self, gradient, part if gradient.index in self.on_host else self.injected_part
        )

    yield HostCopy, "issue", at_once
    yield DriveCopy, "_read", unasked
    yield Reducer, "finish_reduce", early
    yield Reducer, "_add", added


def no_rollback(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.host_step.early import EarlySteps

    yield (
        EarlySteps,
        "decide",
        lambda decide: lambda self, stepped, standing, skipped: decide(self, stepped, list(stepped), skipped),
    )


def undelayed(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.host_step.delayed import DelayedUpdate

    yield DelayedUpdate, "delays", lambda delays: property(lambda self: False)


def no_late_sum(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.megatron import late_sums

    yield late_sums.MadeWhole, "keep", lambda keep: lambda self: None


def lose_update(number: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.host_step.delayed import DelayedUpdate

    def lost(updated):
        def call(self, *arguments, **how) -> None:
            self.injected_taken = getattr(self, "injected_taken", 0) + bool(self._taken)
            if self._taken and self.injected_taken == number:
                for unit in (unit for units, _ in self._taken for unit in units):
                    unit.give_up()
                self._taken = []
            updated(self, *arguments, **how)

        return call

    yield DelayedUpdate, "updated", lost


def stale_group(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.publisher import Publisher
    from megatron_ext.runtime.routes.shard_gather import ShardGather

    def as_at_first(self, group):
        """``group`` with its first shard, which is kept where it rested."""
        if not hasattr(self, "injected_first"):
            self.injected_first = copy.copy(group)
            self.injected_first.shard = group.shard.clone()
        return self.injected_first

    def published(place):
        def call(self, number, target, from_shards):
            if target.group.index == index:
                first = as_at_first(self, target.group)
                target, from_shards = target._replace(group=first), True
            return place(self, number, target, from_shards)

        return call

    def gathered(issue):
        return lambda self, group: issue(self, as_at_first(self, group) if group.index == index else group)

    yield Publisher, "_place", published
    yield ShardGather, "issue", gathered


def skip_group(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.megatron import build_executor

    def skipping(place_actions):
        def call(schedule, rank, *arguments, **how):
            return place_actions(schedule, without_group(rank, index), *arguments, **how)

        return call

    yield build_executor, "place_actions", skipping


def without_group(rank, index: int):
    """A schedule's actions of a rank, but for those of a group."""

    def without(entry):
        lists = {name: getattr(entry, name) for name in ("unshard", "stage_in", "reshard") if hasattr(entry, name)}
        return replace(entry, **{name: tuple(a for a in found if a.group != index) for name, found in lists.items()})

    return replace(rank, start=without(rank.start), steps=tuple(map(without, rank.steps)))


def short_read(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.routes.drive_copy import DriveCopy

    def cut(self, group, slot, version, *arguments) -> None:
        if group.index == index and version > 2:
            cut_short(self.pool, group)

    yield DriveCopy, "_read", before(cut)


def cut_short(pool, group) -> None:
    """The file of an NvmePool ends in the middle of ``group`` from now on."""
    file, offset = pool.place_of[group.index]
    os.ftruncate(file.descriptor, offset + group.bytes // 2)


def skip_reduce(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.gradients import GradientState, Reducer

    def skipping(reduce):
        def call(self, gradient, last=False):
            if gradient.index != index:
                return reduce(self, gradient, last)
            self.finish_reduce()
            gradient.version += 1
            gradient.resize(0)
            gradient.state = GradientState.FREED
            self.residency.bytes -= gradient.bytes

        return call

    yield Reducer, "reduce", skipping


def skip_step(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.megatron import lifecycle
    from megatron_ext.megatron.shards import places_of_groups

    def forget(parameter, *_) -> None:
        parameter.grad = None

    def leaving_out(build):
        def call(own):
            executor = build(own)
            for optimizer, group, _, _, shard in places_of_groups(own.optimizers, own.buckets):
                if group.index == index:
                    hook = functools.partial(forget, optimizer.optimizer.param_to_fp32_param[shard])
                    optimizer.optimizer.gpu_optimizer.register_step_pre_hook(hook)
            return executor

        return call

    yield lifecycle, "build_executor", leaving_out


def late_add(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.gradients import Reducer

    def held(add):
        def call(self, gradient, part):
            if gradient.index == index and getattr(self, "injected_held", None) is None:
                self.injected_held = part.clone()
            else:
                add(self, gradient, part)

        return call

    def at_the_end(end):
        def call(self):
            end(self)
            if getattr(self, "injected_held", None) is not None:
                self.gradients[index].shard.add_(self.injected_held)
                self.injected_held = None

        return call

    yield Reducer, "_add", held
    yield Reducer, "end", at_the_end


def connect_early(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.routes.buffered_gather import BufferedGather

    def and_connect(make_buffers):
        def call(self, groups) -> None:
            make_buffers(self, groups)
            self.connect()

        return call

    yield BufferedGather, "make_buffers", and_connect


CONTROLS = {
    "no_wait": no_wait,
    "no_rollback": no_rollback,
    "undelayed": undelayed,
    "no_late_sum": no_late_sum,
    "lose_update": lose_update,
    "stale_group": stale_group,
    "skip_group": skip_group,
    "short_read": short_read,
    "skip_reduce": skip_reduce,
    "skip_step": skip_step,
    "late_add": late_add,
    "connect_early": connect_early,
}
"""By the name of the fault: what is wrapped, by its value."""
