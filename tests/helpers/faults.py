"""Faults put in on purpose, by wrapping what the product does: delays that move work around, and negative controls.

A parity test that passes without any synchronisation one run in three proves nothing, so the tests delay publishing,
copying and gathering at random, and take single safeguards away to see that training then differs. The product knows
nothing of it. A program of tests asks by ``MEGATRON_EXT_FAULTS="publish_delay_ms=20,copy_delay_ms=5,seed=3"``, see
``at_start/sitecustomize.py``; a test within its process uses :func:`injected`.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from negative_controls import CONTROLS, Wrapper, before

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
        no_late_sum: negative control; gradients of norms are not added up among tensor-parallel ranks.
        connect_early: negative control; a rank connects before it knows that all have their memory.
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
    no_late_sum: int = 0
    connect_early: int = 0
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


def _wrappers(faults: Faults) -> Iterator[tuple[Any, str, Wrapper]]:
    """What is wrapped: where, under which name, and the function from what is there to what is put in its place."""
    if any(getattr(faults, name) for name in Faults._fields if name.endswith("_delay_ms")):
        yield from _delays(faults)
    for name, control in CONTROLS.items():
        value = getattr(faults, name)
        if value != Faults._field_defaults[name]:
            yield from control(value)


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
        yield Publisher, "_copy", before(own_shards)
        yield Publisher, "_bring", before(brought)
    if faults.copy_delay_ms:
        yield HostCopy, "_copy", before(stream(faults.copy_delay_ms, lambda self: self.stream))
        yield ShardGather, "_queue", before(stream(faults.copy_delay_ms, lambda self: self._copies))
    if faults.read_delay_ms:
        yield DriveCopy, "_read", before(thread(faults.read_delay_ms))
    if faults.reduce_delay_ms:
        yield Reducer, "reduce", before(thread(faults.reduce_delay_ms))
        yield GradientsToHost, "_add", before(thread(faults.reduce_delay_ms))
    if faults.step_delay_ms:
        yield EarlySteps, "_step", _both_sides(thread(faults.step_delay_ms))
        yield DelayedUpdate, "_step", _both_sides(thread(faults.step_delay_ms))
