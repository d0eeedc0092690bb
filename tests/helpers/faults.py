"""Faults put in on purpose, by wrapping what the product does: delays that move work around, and negative controls.

A parity test that passes without any synchronisation one run in three proves nothing, so the tests delay publishing,
copying and gathering at random, and take single safeguards away to see that training then differs. The product knows
nothing of it. A program of tests asks by ``MEGATRON_EXT_FAULTS="publish_delay_ms=20,copy_delay_ms=5,seed=3"``, see
``at_start/sitecustomize.py``; a test within its process uses :func:`injected`.
"""

import contextlib
import copy
import functools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from msgspec.structs import replace

VARIABLE = "MEGATRON_EXT_FAULTS"


def asked(text: str, path: str = "") -> dict[str, str]:
    """Variables of a program that is to have the faults ``text``; ``path``: its PYTHONPATH otherwise."""
    return {VARIABLE: text, "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("at_start")), path])}


class Faults(NamedTuple):
    """What is put in.

    Attributes:
        publish_delay_ms, copy_delay_ms, read_delay_ms, reduce_delay_ms, step_delay_ms: upper bounds of uniform draws,
            in milliseconds.
        seed: of the draws.
        no_wait: negative control; copies do not wait for the other ranks' shards, and gradients are added before they
            are reduced.
        no_rollback: negative control; every step during the backward stands.
        undelayed: negative control; every delayed update is applied at once.
        lose_update: negative control; the delayed update of this number, from 1, is not made.
        stale_group: this group is published as it was at first, and comes by ``cpu_shard`` from its first shard.
        skip_group: this group is never gathered.
        short_read: reads of this group are cut off on the drive in the middle of training.
        skip_reduce: this group's gradient is never reduced.
        skip_step: this group, whose states rest on the device, is never stepped.
        late_add: the first part of this group's gradient is added to its shard behind all others.
    """

    publish_delay_ms: float = 0.0
    copy_delay_ms: float = 0.0
    read_delay_ms: float = 0.0
    reduce_delay_ms: float = 0.0
    step_delay_ms: float = 0.0
    seed: int = 0
    # Switches: 1 is on.
    no_wait: int = 0
    no_rollback: int = 0
    undelayed: int = 0
    # Numbers, of groups but for the first: -1 is none.
    lose_update: int = -1
    stale_group: int = -1
    skip_group: int = -1
    short_read: int = -1
    skip_reduce: int = -1
    skip_step: int = -1
    late_add: int = -1

    def pause(self, owner: Any, milliseconds: float) -> Callable[..., None]:
        """``pause(sleep)`` of up to so long; every object, and every rank, draws for itself."""
        if "injected_draw" not in owner.__dict__:
            salt = sum(map(ord, type(owner).__name__)) + 31 * int(os.environ.get("RANK", "0"))
            owner.injected_draw = random.Random(self.seed * 1000003 + salt)
        return lambda sleep=time.sleep: sleep(owner.injected_draw.random() * milliseconds / 1e3)


def parse(text: str) -> Faults:
    """Of the variable's value; raises ValueError on an unknown name or a value that is no number."""
    named = dict(part.split("=") for part in text.split(",") if part)
    if not named.keys() <= {*Faults._fields}:
        raise ValueError(f"{VARIABLE}: known are {', '.join(Faults._fields)}")
    return Faults(**{name: type(Faults._field_defaults[name])(value) for name, value in named.items()})


@contextlib.contextmanager
def injected(**faults) -> Iterator[None]:
    """Within, the product has ``faults``, by the names of :class:`Faults`."""
    with contextlib.ExitStack() as stack:
        for owner, name, wrapped in _wrappers(Faults(**faults)):
            stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))
        yield


@contextlib.contextmanager
def from_environment() -> Iterator[None]:
    """The same of what the environment asks for."""
    with injected(**parse(os.environ.get(VARIABLE, ""))._asdict()):
        yield


Wrapper = Callable[[Callable], Any]


def _wrappers(faults: Faults) -> Iterator[tuple[Any, str, Wrapper]]:
    """What is wrapped: where, under which name, and the function from what is there to what is put in its place."""
    if any(getattr(faults, name) for name in Faults._fields if name.endswith("_delay_ms")):
        yield from _delays(faults)
    controls = {
        "no_wait": _no_wait,
        "no_rollback": _no_rollback,
        "undelayed": _undelayed,
        "lose_update": _lose_update,
        "stale_group": _stale_group,
        "skip_group": _skip_group,
        "short_read": _short_read,
        "skip_reduce": _skip_reduce,
        "skip_step": _skip_step,
        "late_add": _late_add,
    }
    for name, control in controls.items():
        value = getattr(faults, name)
        if value != Faults._field_defaults[name]:
            yield from control(value)


def _before(pause: Callable[..., None]) -> Wrapper:
    """``pause(self, *arguments)`` before the method."""

    def wrap(method):
        @functools.wraps(method)
        def call(self, *arguments):
            pause(self, *arguments)
            return method(self, *arguments)

        return call

    return wrap


def _both_sides(pause: Callable[..., None]) -> Wrapper:
    def wrap(method):
        def call(self, *arguments):
            pause(self, *arguments)
            method(self, *arguments)
            pause(self, *arguments)

        return call

    return wrap


def _on_stream(stream, pause: Callable[..., None]) -> None:
    """Queue a pause: of the thread that stands for a stream, or of a device."""
    sleep = getattr(torch.cuda, "_sleep", None) if hasattr(getattr(stream, "stream", None), "cuda_stream") else None
    if sleep is None:
        stream.run(pause)
    else:
        pause(lambda seconds: stream.run(lambda: sleep(int(seconds * 1.5e9))))  # cycles


def _delays(faults: Faults) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.gradients import GradientsToHost, Reducer
    from megatron_ext.runtime.host_step.delayed import DelayedUpdate
    from megatron_ext.runtime.host_step.early import EarlySteps
    from megatron_ext.runtime.publisher import Publisher
    from megatron_ext.runtime.routes.drive_copy import DriveCopy
    from megatron_ext.runtime.routes.host_copy import HostCopy
    from megatron_ext.runtime.routes.shard_gather import ShardGather

    def thread(milliseconds: float) -> Callable[..., None]:
        return lambda self, *arguments: faults.pause(self, milliseconds)()

    def stream(milliseconds: float, of: Callable) -> Callable[..., None]:
        return lambda self, *arguments: _on_stream(of(self), faults.pause(self, milliseconds))

    def own_shards(self, shard, *arguments) -> None:
        if not shard.target.group.on_host:
            _on_stream(self.stream, faults.pause(self, faults.publish_delay_ms))

    def brought(self, shard, *arguments) -> None:
        if shard.pieces is not None or shard.target.group.on_host:
            faults.pause(self, faults.publish_delay_ms)()

    if faults.publish_delay_ms:
        yield Publisher, "_copy", _before(own_shards)
        yield Publisher, "_bring", _before(brought)
    if faults.copy_delay_ms:
        yield HostCopy, "_copy", _before(stream(faults.copy_delay_ms, lambda self: self.stream))
        yield ShardGather, "_queue", _before(stream(faults.copy_delay_ms, lambda self: self._copies))
    if faults.read_delay_ms:
        yield DriveCopy, "_read", _before(thread(faults.read_delay_ms))
    if faults.reduce_delay_ms:
        yield Reducer, "reduce", _before(thread(faults.reduce_delay_ms))
        yield GradientsToHost, "_add", _before(thread(faults.reduce_delay_ms))
    if faults.step_delay_ms:
        yield EarlySteps, "_step", _both_sides(thread(faults.step_delay_ms))
        yield DelayedUpdate, "_step", _both_sides(thread(faults.step_delay_ms))


class _Published:
    """Flags of host copies, all of which are said to be published."""

    def __init__(self, flags):
        self._flags = flags

    def __getattr__(self, name: str):
        return getattr(self._flags, name)

    def is_published(self, *arguments) -> bool:
        return True


def _no_wait(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
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


def _no_rollback(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.host_step.early import EarlySteps

    yield (
        EarlySteps,
        "decide",
        lambda decide: lambda self, stepped, standing, skipped: decide(self, stepped, list(stepped), skipped),
    )


def _undelayed(on: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.host_step.delayed import DelayedUpdate

    yield DelayedUpdate, "delays", lambda delays: property(lambda self: False)


def _lose_update(number: int) -> Iterator[tuple[Any, str, Wrapper]]:
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


def _stale_group(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
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


def _skip_group(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.megatron import build_executor

    def skipping(compile_program):
        def call(schedule, rank, *arguments, **how):
            return compile_program(schedule, without_group(rank, index), *arguments, **how)

        return call

    yield build_executor, "compile_program", skipping


def without_group(rank, index: int):
    """A schedule's actions of a rank, but for those of a group."""

    def without(entry):
        lists = {name: getattr(entry, name) for name in ("unshard", "stage_in", "reshard") if hasattr(entry, name)}
        return replace(entry, **{name: tuple(a for a in found if a.group != index) for name, found in lists.items()})

    return replace(rank, start=without(rank.start), steps=tuple(map(without, rank.steps)))


def _short_read(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.routes.drive_copy import DriveCopy

    def cut(self, group, slot, version, *arguments) -> None:
        if group.index == index and version > 2:
            cut_short(self.pool, group)

    yield DriveCopy, "_read", _before(cut)


def cut_short(pool, group) -> None:
    """The file of an NvmePool ends in the middle of ``group`` from now on."""
    file, offset = pool.place_of[group.index]
    os.ftruncate(file.descriptor, offset + group.bytes // 2)


def _skip_reduce(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
    from megatron_ext.runtime.gradients import Reducer

    def skipping(reduce):
        def call(self, gradient, last=False):
            if gradient.index != index:
                return reduce(self, gradient, last)
            self.finish_reduce()
            gradient.version += 1
            self._free(gradient)

        return call

    yield Reducer, "reduce", skipping


def _skip_step(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
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


def _late_add(index: int) -> Iterator[tuple[Any, str, Wrapper]]:
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
