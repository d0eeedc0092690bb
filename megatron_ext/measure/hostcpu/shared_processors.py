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

from megatron_ext.cost.cost_table import Compute
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.layer_times import Runner, clock, load_runners, measure_compute, micro_batch_us
from megatron_ext.measure.operations import MatrixProduct

MIN_REPEATS, MAX_REPEATS = 2, 40
"""Micro-batches of a round, after one that warms up."""
ROUNDS, MAX_COMPUTE_ROUNDS = 4, 192
"""Rounds of one rank alone and of all ranks at once: more where layers are short or there is much time, because a
processor's speed changes from second to second."""
LEAST_ROUNDS = 2
"""Where a micro-batch takes seconds, so that there is no time for more."""

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


class Counts(NamedTuple):
    """How often compute is measured: rounds, micro-batches of a round, and micro-batches that warm it up."""

    rounds: int
    repeats: int
    warmup: int


def counts_within(seconds: float, micro_batch_us: float, parts: int) -> Counts:
    """Counts that take about ``seconds``, one rank alone and all ranks at once together.

    Where a micro-batch is so long that there is no time for one in every round, there are few rounds and no warm-up.

    Args:
        micro_batch_us: forward and backward through all layers, of one rank alone.
        parts: in how many parts the rounds are taken; each part has at least one, unless micro-batches are long.
    """
    # All at once take twice as long as one alone, or more where many ranks share processors.
    micro_batches, least = seconds * 1e6 / 3 / micro_batch_us, max(ROUNDS, parts)
    if micro_batches < least:
        return Counts(max(LEAST_ROUNDS, int(micro_batches)), 1, 0)
    # More rounds rather than longer ones: one rank alone is compared with all ranks within a round.
    rounds = max(least, min(MAX_COMPUTE_ROUNDS, int(micro_batches / (MIN_REPEATS + 1))))
    return Counts(rounds, max(MIN_REPEATS, min(MAX_REPEATS, int(micro_batches / rounds) - 1)), 1)


class ComputeRounds:
    """One rank alone and all ranks at once, interleaved, so that both meet the same state of the machine.

    The rounds are taken in several parts, with other measurements in between, because a shared machine changes its
    speed for seconds. Every method is collective.

    Args:
        seconds: for all rounds together.
        parts: in how many parts they are taken.
        report: ``report(what)``.
    """

    def __init__(
        self, fabric: Fabric, runners: Mapping[str, Runner], seconds: float, parts: int, report: Callable[[str], None]
    ):
        self._fabric, self._runners, self._report = fabric, runners, report
        report("compute, once")
        once = max(
            micro_batch_us(measure_compute(runners, 1, evict_bytes=fabric.options.evict_bytes, warmup=1), runners), 1.0
        )
        rounds, *self._counts = map(fabric.agree, counts_within(seconds, once, parts))
        self._shares = [rounds * (part + 1) // parts - rounds * part // parts for part in range(parts)]
        self._rounds, self._alone, self._together = rounds, [], []

    def take(self, part: int) -> None:
        """Measure the rounds of one part."""
        for _ in range(self._shares[part]):
            number = f"({len(self._alone) + 1}/{self._rounds})"
            self._report(f"compute, one rank alone {number}")
            self._alone.append(_alone(self._fabric, self._runners, *self._counts))
            self._report(f"compute, all ranks at once {number}")
            self._together.append(_together(self._fabric, self._runners, *self._counts))

    def result(self) -> dict:
        """``{"rows": [...], "processors_per_node": float or None}``; rows only for handed modules."""
        return _result(self._fabric, self._runners, self._alone, self._together)


def _result(fabric: Fabric, runners: Mapping[str, Runner], alone: list, together: list) -> dict:
    options, rounds = fabric.options, len(alone)
    everyone: list = [None] * fabric.world_size
    dist.all_gather_object(everyone, (together, _idle_processors(fabric), _place(fabric)))
    if fabric.rank != 0:
        return {}
    rows = [_middle(of_kind) for of_kind in zip(*alone)]
    at_once, slowdown, sharing = None, 1.0, 1
    if fabric.torch_device.type == "cpu":
        # Each round of all ranks against the round of one rank just before it.
        slowdown = median(
            median(seen[index].micro_batch_us for seen, *_ in everyone) / micro_batch_us(alone[index], runners)
            for index in range(rounds)
        )
        if clock() is perf_counter:  # waiting for a processor is in the slowdown
            at_once, slowdown = options.node_size / max(slowdown, 1.0), 1.0
        else:
            # By processor time it is not, nor is what the ranks' threads take without any work.
            sharing = nodes_sharing([place for *_, place in everyone])
            ranks, processors = options.node_size * sharing, len(os.sched_getaffinity(0))
            left = processors - sum(idle for _, idle, _ in everyone[:ranks])
            busy = kept_busy([seen for seen, *_ in everyone[:ranks]], min(ranks, processors))
            at_once = min(ranks, max(left, 0.1)) * busy / max(slowdown, 1.0)
    totals = [micro_batch_us(rows, runners) for rows in alone]
    return {
        "rows": msgspec.to_builtins(rows) if options.modules is not None else [],
        "model": _model(fabric, runners) if options.modules is not None else None,
        "processors_per_node": at_once,
        "nodes_sharing": sharing if at_once is not None and sharing > 1 else None,
        "slowdown": max(slowdown, 1.0),
        "drift": max(totals) / min(totals) - 1,
        "rounds": rounds,
        "compute_rounds": [
            (together[index].ended_s, median(seen[index].micro_batch_us for seen, *_ in everyone))
            for index in range(rounds)
        ],
    }


def _model(fabric: Fabric, runners: Mapping[str, Runner]) -> dict:
    """What compute was measured of; a factory's runners may say their ``dtype``."""
    options = fabric.options
    shape = {name: getattr(options, name) for name in ("hidden_size", "seq_length", "micro_batch_size")}
    dtypes = sorted({dtype for runner in runners.values() if (dtype := getattr(runner, "dtype", None)) is not None})
    return shape | ({"dtype": dtypes[0]} if len(dtypes) == 1 else {})


class Round(NamedTuple):
    """One round of all ranks at once, as one rank saw it.

    Attributes:
        micro_batch_us: forward and backward through all layers.
        whole_us: the whole round, from the barrier on.
        processor_us: processor time of all threads of the rank in it.
        ended_s: when it ended, Unix time in seconds.
    """

    micro_batch_us: float
    whole_us: float
    processor_us: float
    ended_s: float = 0.0


def _together(fabric: Fabric, runners, repeats: int, warmup: int) -> Round:
    fabric.barrier()
    start, used = perf_counter(), process_time()
    rows = measure_compute(runners, repeats, evict_bytes=fabric.options.evict_bytes, warmup=warmup)
    return Round(micro_batch_us(rows, runners), (perf_counter() - start) * 1e6, (process_time() - used) * 1e6, time())


def kept_busy(rounds_of_ranks: Sequence[Sequence[Round]], processors: int) -> float:
    """Share of ``processors`` that the ranks keep busy until the last rank is done; the median over rounds.

    With more ranks than processors, some ranks are done first, and the remaining ones cannot use all processors.
    """
    shares = [
        sum(one.processor_us for one in index) / (max(one.whole_us for one in index) * processors)
        for index in zip(*rounds_of_ranks)
    ]
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
    """Rows of rank 0 while all other ranks sleep in the barrier."""
    fabric.barrier()
    rows = (
        measure_compute(runners, repeats, evict_bytes=fabric.options.evict_bytes, warmup=warmup)
        if fabric.rank == 0
        else []
    )
    fabric.barrier()
    return rows


def _middle(rounds: Sequence[Compute]) -> Compute:
    """One layer kind measured in several rounds: the median of each figure, samples of all."""
    fields = ["forward_us", "backward_us", "forward_p95_us", "backward_p95_us"]
    fields += ["forward_launch_us", "backward_launch_us"] * (rounds[0].forward_launch_us is not None)
    medians = {name: median(getattr(row, name) for row in rounds) for name in fields}
    return msgspec.structs.replace(rounds[0], **medians, samples=sum(row.samples for row in rounds))
