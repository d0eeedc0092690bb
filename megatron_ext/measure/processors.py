"""Compute of one rank alone and of all ranks at once, and what that says of the processors
that they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import msgspec
import torch.distributed as dist

from megatron_ext.cost.model import Compute
from megatron_ext.measure.compute import clock, load_runners, measure_compute, total_us
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operations import MatrixProduct

MAX_REPEATS = 40
TURNS = 4


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


def run(fabric: Fabric, seconds: float, report: Callable[[str], None]) -> dict:
    """``{"rows": [...], "processors_per_node": float or None}``; rows only for handed modules."""
    options = fabric.options
    if options.modules is not None:
        runners = load_runners(options.modules, list(options.module_args))
    else:
        runners = {"product": ProductRunner(fabric)}
    report("compute, once")
    once = total_us(measure_compute(runners, 1, evict_bytes=options.evict_bytes, warmup=1))
    # Alone and together in turns: what else the machine does must not look like either.
    repeats = fabric.agree(max(3, min(MAX_REPEATS, int(seconds * 1e6 / 3 / TURNS / max(once, 1.0)))))
    alone, together = [], []
    for turn in range(TURNS):
        report(f"compute, one rank alone ({turn + 1}/{TURNS})")
        alone.append(_alone(fabric, runners, repeats))
        report(f"compute, all ranks at once ({turn + 1}/{TURNS})")
        together.append(measure_compute(runners, repeats, evict_bytes=options.evict_bytes, warmup=1))
    everyone: list = [None] * fabric.world_size
    dist.all_gather_object(everyone, [total_us(rows) for rows in together])
    if fabric.rank != 0:
        return {}
    rows = [_middle(turns) for turns in zip(*alone)]
    at_once = None
    if fabric.torch_device.type == "cpu":
        # Each turn together against the turn alone just before it.
        slowdown = median(median(totals[turn] for totals in everyone) / total_us(alone[turn]) for turn in range(TURNS))
        # By the clock, waiting for a processor is in the slowdown; by processor time it is not.
        limit = options.node_size if clock() is perf_counter else min(options.node_size, len(os.sched_getaffinity(0)))
        at_once = limit / max(slowdown, 1.0)
    totals = [total_us(rows) for rows in alone]
    return {
        "rows": msgspec.to_builtins(rows) if options.modules is not None else [],
        "processors_per_node": at_once,
        "drift": max(totals) / min(totals) - 1,
    }


def _alone(fabric: Fabric, runners, repeats: int) -> list:
    """Rows of rank 0 while all others sleep in the barrier."""
    fabric.barrier()
    rows = measure_compute(runners, repeats, evict_bytes=fabric.options.evict_bytes, warmup=1) if fabric.rank == 0 else []
    fabric.barrier()
    return rows


def _middle(turns: Sequence[Compute]) -> Compute:
    """One kind measured in several turns: the median of each figure, samples of all."""
    fields = ("forward_us", "backward_us", "forward_p95_us", "backward_p95_us")
    medians = {name: median(getattr(row, name) for row in turns) for name in fields}
    return msgspec.structs.replace(turns[0], **medians, samples=sum(row.samples for row in turns))
