"""Compute of one rank alone and of all ranks at once, and what that says of the processors
that they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep, time
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from megatron_ext.cost.model import Compute
from megatron_ext.measure.compute import Runner, clock, load_runners, measure_compute, walk_us
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operations import MatrixProduct

MIN_REPEATS, MAX_REPEATS = 2, 40
"""Walks through all layers in a turn, behind one that warms up."""
TURNS, MAX_TURNS = 4, 192
"""Turns of one rank alone and of all at once: more where layers are short or there is much time, for a processor's
speed changes from second to second."""
LEAST_TURNS = 2
"""Where a walk takes seconds, for which there is no time more often."""

IDLE_SECONDS = 0.5

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same on nodes that are emulated on one machine."""


class ProductRunner:
    """Matrix products of the model's shapes, where no modules are handed over: forward is the
    product, backward two more of the same size."""

    def __init__(self, fabric: Fabric):
        self.operation = MatrixProduct(fabric)

    def forward(self) -> None:
        self.operation.issue(0, 0)

    def backward(self) -> None:
        self.operation.issue(0, 0)
        self.operation.issue(0, 0)


def runners_of(fabric: Fabric) -> Mapping[str, Runner]:
    """The layers that are handed over, or matrix products of the model's shapes. Collective."""
    options = fabric.options
    if options.modules is not None:
        return load_runners(options.modules, list(options.module_args))
    return {"product": ProductRunner(fabric)}


class Walks(NamedTuple):
    """How often compute is measured: walks of a turn behind those that warm it up."""

    turns: int
    repeats: int
    warmup: int


def walks_within(seconds: float, walk_us: float, parts: int) -> Walks:
    """What takes about ``seconds``, of one rank alone and of all at once. Where a walk is so long that there is
    no time for one in every turn, turns are few, and a walk warms itself up, as an iteration of training does.

    Args:
        walk_us: a walk through all layers, of one rank alone.
        parts: in which the turns are taken; each has one at least, unless walks are long.
    """
    # All at once take twice as long as one alone, or more where many ranks share processors.
    walks, least = seconds * 1e6 / 3 / walk_us, max(TURNS, parts)
    if walks < least:
        return Walks(max(LEAST_TURNS, int(walks)), 1, 0)
    # Rather more turns than longer ones: how fast one rank is beside all is compared within a turn.
    turns = max(least, min(MAX_TURNS, int(walks / (MIN_REPEATS + 1))))
    return Walks(turns, max(MIN_REPEATS, min(MAX_REPEATS, int(walks / turns) - 1)), 1)


class Turns:
    """One rank alone and all at once in turns: what else the machine does must not look like either.

    The turns are taken in several parts, with other measuring in between: a machine that is shared
    changes its speed for seconds. Every method is collective.

    Args:
        seconds: for all turns together.
        parts: in how many parts they are taken.
        report: ``report(what)``.
    """

    def __init__(self, fabric: Fabric, runners: Mapping[str, Runner], seconds: float, parts: int, report: Callable[[str], None]):
        self._fabric, self._runners, self._report = fabric, runners, report
        report("compute, once")
        once = max(walk_us(measure_compute(runners, 1, evict_bytes=fabric.options.evict_bytes, warmup=1), runners), 1.0)
        turns, *self._walks = map(fabric.agree, walks_within(seconds, once, parts))
        self._shares = [turns * (part + 1) // parts - turns * part // parts for part in range(parts)]
        self._turns, self._alone, self._together = turns, [], []

    def take(self, part: int) -> None:
        """The turns of one part."""
        for _ in range(self._shares[part]):
            number = f"({len(self._alone) + 1}/{self._turns})"
            self._report(f"compute, one rank alone {number}")
            self._alone.append(_alone(self._fabric, self._runners, *self._walks))
            self._report(f"compute, all ranks at once {number}")
            self._together.append(_together(self._fabric, self._runners, *self._walks))

    def result(self) -> dict:
        """``{"rows": [...], "processors_per_node": float or None}``; rows only for handed modules."""
        return _result(self._fabric, self._runners, self._alone, self._together)


def _result(fabric: Fabric, runners: Mapping[str, Runner], alone: list, together: list) -> dict:
    options, turns = fabric.options, len(alone)
    everyone: list = [None] * fabric.world_size
    dist.all_gather_object(everyone, (together, _idle_processors(fabric), _place(fabric)))
    if fabric.rank != 0:
        return {}
    rows = [_middle(of_kind) for of_kind in zip(*alone)]
    at_once, slowdown, sharing = None, 1.0, 1
    if fabric.torch_device.type == "cpu":
        # Each turn together against the turn alone just before it.
        slowdown = median(median(walked[turn].walk_us for walked, *_ in everyone) / walk_us(alone[turn], runners) for turn in range(turns))
        if clock() is perf_counter:  # waiting for a processor is in the slowdown
            at_once, slowdown = options.node_size / max(slowdown, 1.0), 1.0
        else:
            # By processor time it is not, nor is what the ranks' threads take without any work.
            sharing = nodes_sharing([place for *_, place in everyone])
            ranks, processors = options.node_size * sharing, len(os.sched_getaffinity(0))
            left = processors - sum(idle for _, idle, _ in everyone[:ranks])
            busy = kept_busy([walked for walked, *_ in everyone[:ranks]], min(ranks, processors))
            at_once = min(ranks, max(left, 0.1)) * busy / max(slowdown, 1.0)
    totals = [walk_us(rows, runners) for rows in alone]
    return {
        "rows": msgspec.to_builtins(rows) if options.modules is not None else [],
        "model": _model(fabric, runners) if options.modules is not None else None,
        "processors_per_node": at_once,
        "nodes_sharing": sharing if at_once is not None and sharing > 1 else None,
        "slowdown": max(slowdown, 1.0),
        "drift": max(totals) / min(totals) - 1,
        "turns": turns,
        "pace": [(together[turn].ended_s, median(walked[turn].walk_us for walked, *_ in everyone)) for turn in range(turns)],
    }


def _model(fabric: Fabric, runners: Mapping[str, Runner]) -> dict:
    """What compute was measured of; a factory's runners may say their ``dtype``."""
    options = fabric.options
    shape = {name: getattr(options, name) for name in ("hidden_size", "seq_length", "micro_batch_size")}
    dtypes = sorted({dtype for runner in runners.values() if (dtype := getattr(runner, "dtype", None)) is not None})
    return shape | ({"dtype": dtypes[0]} if len(dtypes) == 1 else {})


class Walked(NamedTuple):
    """One turn of all ranks at once, as one rank saw it: a walk, the whole turn from the barrier on, the
    processor time of all its threads in it, and when it ended, in seconds of Unix time."""

    walk_us: float
    whole_us: float
    processor_us: float
    ended_s: float = 0.0


def _together(fabric: Fabric, runners, repeats: int, warmup: int) -> Walked:
    fabric.barrier()
    start, used = perf_counter(), process_time()
    rows = measure_compute(runners, repeats, evict_bytes=fabric.options.evict_bytes, warmup=warmup)
    return Walked(walk_us(rows, runners), (perf_counter() - start) * 1e6, (process_time() - used) * 1e6, time())


def kept_busy(turns_of_ranks: Sequence[Sequence[Walked]], processors: int) -> float:
    """Share of ``processors`` that ranks which share them keep busy until the last of them is done, the
    median over turns. Where there are more ranks than processors some are done before others, which
    have then fewer than all processors to themselves: by how much is for the kernel's scheduler to say.
    """
    shares = [sum(one.processor_us for one in turn) / (max(one.whole_us for one in turn) * processors) for turn in zip(*turns_of_ranks)]
    return min(median(shares), 1.0)


class Place(NamedTuple):
    """Where a rank runs: its node, the kernel that this node is on, the processors it may use."""

    node: int
    kernel: str
    processors: frozenset[int]


def kernel_of(fabric: Fabric) -> str:
    """The same for all ranks on one machine, also where their nodes are emulated there."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else str(fabric.node)


def _place(fabric: Fabric) -> Place:
    return Place(fabric.node, kernel_of(fabric), frozenset(os.sched_getaffinity(0)))


def nodes_sharing(places: Sequence[Place]) -> int:
    """How many nodes have the first node's processors together: 1, but where nodes are on one kernel."""
    first = next(place for place in places if place.node == 0)
    return len({place.node for place in places if place.kernel == first.kernel and place.processors & first.processors})


def _idle_processors(fabric: Fabric) -> float:
    """Processors that this rank keeps busy while it does nothing: gloo's threads wake up all the time."""
    fabric.barrier()
    start, used = perf_counter(), process_time()
    sleep(IDLE_SECONDS)
    idle = (process_time() - used) / (perf_counter() - start)
    fabric.barrier()
    return idle


def _alone(fabric: Fabric, runners, repeats: int, warmup: int) -> list:
    """Rows of rank 0 while all others sleep in the barrier."""
    fabric.barrier()
    rows = measure_compute(runners, repeats, evict_bytes=fabric.options.evict_bytes, warmup=warmup) if fabric.rank == 0 else []
    fabric.barrier()
    return rows


def _middle(turns: Sequence[Compute]) -> Compute:
    """One kind measured in several turns: the median of each figure, samples of all."""
    fields = ("forward_us", "backward_us", "forward_p95_us", "backward_p95_us")
    medians = {name: median(getattr(row, name) for row in turns) for name in fields}
    return msgspec.structs.replace(turns[0], **medians, samples=sum(row.samples for row in turns))
