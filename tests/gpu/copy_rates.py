"""Rates of this machine's links, each by one plain loop: host memory, and copies in both directions over PCIe."""

import time
from collections.abc import Callable

import torch

from megatron_ext.runtime.device import has_cuda

BYTES = 2 << 30
DRY_BYTES = 16 << 20
REPEATS = 4


def copy_rates(dry_run: bool) -> dict:
    """GB/s, the best of a few repeats."""
    size = DRY_BYTES if dry_run else BYTES
    ours, theirs = (torch.full((size // 4,), float(value)) for value in (1, 2))
    figures: dict[str, float | int] = {
        "threads": torch.get_num_threads(),
        # Two are read and one is written.
        "host_add_gb_per_s": 3 * size / _best(lambda: ours.add_(theirs)) / 1e9,
        "host_copy_gb_per_s": 2 * size / _best(lambda: ours.copy_(theirs)) / 1e9,
    }
    if has_cuda():
        figures |= _over_pcie(size)
    return {name: round(value, 1) for name, value in figures.items()}


def _over_pcie(size: int) -> dict[str, float]:
    to, back = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, from_there = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    pageable, streams = torch.ones(size, dtype=torch.uint8), [torch.cuda.Stream() for _ in range(2)]

    def at_once() -> None:
        for stream, target, source in zip(streams, (there, back), (to, from_there)):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    loops = {
        "h2d": lambda: there.copy_(to, non_blocking=True),
        "d2h": lambda: back.copy_(from_there, non_blocking=True),
        "both_directions_each": at_once,
        "h2d_pageable": lambda: there.copy_(pageable),
    }
    return {f"{name}_gb_per_s": size / _best(loop, torch.cuda.synchronize) / 1e9 for name, loop in loops.items()}


def _best(loop: Callable[[], object], settle: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest repeat."""
    times = []
    for _ in range(REPEATS):
        settle()
        begun = time.perf_counter()
        loop()
        settle()
        times.append(time.perf_counter() - begun)
    return min(times)
