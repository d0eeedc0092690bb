"""Compute of one rank alone and of all ranks at once, and what that says of the processors
that they share."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import msgspec
import torch.distributed as dist

from megatron_ext.measure.compute import load_runners, measure_compute, total_us
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operations import MatrixProduct

MAX_REPEATS = 40


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
    # A third of the time alone, two thirds for all at once: they take longer there.
    repeats = fabric.agree(max(5, min(MAX_REPEATS, int(seconds * 1e6 / 3 / max(once, 1.0)))))
    report("compute, one rank alone")
    before = _alone(fabric, runners, -(-repeats // 2))
    fabric.barrier()
    report("compute, all ranks at once")
    together = measure_compute(runners, repeats, evict_bytes=options.evict_bytes, warmup=1)
    report("compute, one rank alone")
    after = _alone(fabric, runners, -(-repeats // 2))
    totals: list = [None] * fabric.world_size
    dist.all_gather_object(totals, total_us(together))
    if fabric.rank != 0:
        return {}
    rows = [_mean(first, second) for first, second in zip(before, after)]
    processors = None
    if fabric.torch_device.type == "cpu":
        processors = min(fabric.world_size * total_us(rows) / median(totals), float(fabric.world_size))
    return {
        "rows": msgspec.to_builtins(rows) if options.modules is not None else [],
        "processors_per_node": processors,
        "drift": abs(total_us(before) / total_us(after) - 1),
    }


def _alone(fabric: Fabric, runners, repeats: int) -> list:
    """Rows of rank 0 while all others sleep in the barrier."""
    fabric.barrier()
    rows = measure_compute(runners, repeats, evict_bytes=fabric.options.evict_bytes, warmup=1) if fabric.rank == 0 else []
    fabric.barrier()
    return rows


def _mean(first, second):
    """Two measurements of one kind, taken before and after: as many samples of each."""
    fields = ("forward_us", "backward_us", "forward_p95_us", "backward_p95_us")
    means = {name: (getattr(first, name) + getattr(second, name)) / 2 for name in fields}
    return msgspec.structs.replace(first, **means, samples=first.samples + second.samples)
