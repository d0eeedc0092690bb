"""Which share of plain memory traffic the host's step reaches, and how long pages take.

    python benchmarks/host_step.py [--rounds 7] [--out benchmarks/results/host_step.json]

A step of AdamW reads a gradient, and reads and writes a parameter and two moments; then the new parameter is rounded to
16 bits. Compared in turns, over the same number of elements: the step as the run makes it (units with rooms, tensors
that lie behind each other stepped as one), as it was (the same units, tensor by tensor), as Megatron's host optimizer
makes it with ``--overlap-cpu-optimizer-d2h-h2d`` (one optimizer a parameter), and a plain loop: in-place passes of the
same bytes (``p += g``, ``m *= c``, ``v *= c``) and a copy of 16-bit values. Gradients are in host memory already, and
parameters do not leave. What is given is bytes a second, divided by the plain loop's of the same round.

With one thread time is that of the thread (``time.thread_time``), so that other programs on the machine do not count;
with more it is wall time, and of each unit the least of all rounds, too: other programs stop one thread, for which all
others then wait.

Pages: bytes of host memory that are made as a run makes them, as it did (a shared mapping, one thread), and by a plain
loop of several threads that writes fresh memory.
"""

import argparse
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import pictures
import torch
from machine import about_this_machine

from megatron_ext.formats import json_files
from megatron_ext.runtime import block_pages
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW, lay_out
from megatron_ext.runtime.host_step.room import Link, Piece, SharedRooms
from megatron_ext.runtime.host_step.unit import HostUnit
from megatron_ext.runtime.page_locked import large_tensor
from megatron_ext.workload.state_layout import LINE_BYTES, tensor_bytes

ROOT = Path(__file__).parents[1]
CASES = {"large tensors: hidden 1024": (1024, 3), "small tensors: hidden 128": (128, 192)}
"""Hidden size and layers, of about as many parameters."""

UNIT_PARAMETERS = 8 << 20
STEP_BYTES, PLAIN_BYTES = 34, 32
"""A parameter: 28 of fp32; rounding reads 4 and writes 2, a 16-bit copy reads 2 and writes 2."""

SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def units_of(hidden: int, layers: int) -> list[list[int]]:
    """Elements of the parameters of each unit: those of whole GPT layers."""
    layer = [hidden * hidden * factor for factor in (3, 1, 4, 4)] + [hidden * f for f in (1, 1, 3, 1, 1, 1, 4, 1)]
    each = max(UNIT_PARAMETERS // sum(layer), 1)
    return [layer * min(each, layers - first) for first in range(0, layers, each)]


class Step:
    """Steps of all units; :meth:`times` gives seconds of each."""

    bytes = STEP_BYTES

    def __init__(self, units: list[list[int]], kind: type[torch.optim.Optimizer]):
        self.link, room = Link(HostDevice(), torch.device("cpu")), max(sum(map(tensor_bytes, unit)) for unit in units)
        self.rooms, self.units = SharedRooms(self.link, 2, room, False), []
        for number, sizes in enumerate(units):
            parameters = [torch.ones(size) for size in sizes]
            optimizer = kind([{"params": parameters[:4]}, {"params": parameters[4:], "weight_decay": 0.0}], **SETTINGS)
            if kind is FlatAdamW:
                lay_out(optimizer, large_tensor)
            pieces = []
            for parameter in parameters:
                gradient = torch.full_like(parameter, 1e-3)
                pieces.append(Piece(parameter, lambda own=gradient: own, parameter.to(torch.bfloat16)))
            self.units.append(HostUnit(number, optimizer, pieces, self.rooms, LINE_BYTES))

    def times(self, clock: Callable[[], float]) -> list[float]:
        taken = []
        for unit in self.units:
            unit.arrive([])
            unit.wait_for_gradients()
            begin = clock()
            unit.optimizer.step()
            taken.append(clock() - begin)
            unit.give_up()
        return taken

    def close(self) -> None:
        for unit in self.units:
            unit.close()
        self.link.close()


class Megatron:
    """One optimizer a parameter, which rounds its parameter behind its step."""

    bytes = STEP_BYTES

    def __init__(self, units: list[list[int]]):
        self.units = [[self._optimizer(size) for size in sizes] for sizes in units]

    def _optimizer(self, size: int) -> torch.optim.Optimizer:
        parameter, shard = torch.ones(size), torch.empty(size, dtype=torch.bfloat16)
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = torch.optim.AdamW([parameter], **SETTINGS)
        optimizer.register_step_post_hook(lambda *_: shard.copy_(parameter))
        return optimizer

    def times(self, clock: Callable[[], float]) -> list[float]:
        taken = []
        for unit in self.units:
            begin = clock()
            for optimizer in unit:
                optimizer.step()
            taken.append(clock() - begin)
        return taken

    def close(self) -> None:
        self.units.clear()


class Plain:
    """The loop of the same bytes."""

    bytes = PLAIN_BYTES

    def __init__(self, units: list[list[int]]):
        sizes = [sum(unit) for unit in units]
        kinds = [torch.float32] * 4 + [torch.bfloat16] * 2
        self.units = list(zip(*(large_tensor(sum(sizes), dtype).fill_(1e-3).split(sizes) for dtype in kinds)))

    def times(self, clock: Callable[[], float]) -> list[float]:
        taken = []
        for parameter, gradient, first, second, half, other in self.units:
            begin = clock()
            parameter.add_(gradient)
            first.mul_(0.9999)
            second.mul_(0.9999)
            half.copy_(other)
            taken.append(clock() - begin)
        return taken

    def close(self) -> None:
        self.units.clear()


def compare(hidden: int, layers: int, threads: int, rounds: int) -> dict:
    """By contender, its share of the plain loop's bytes a second."""
    torch.set_num_threads(threads)
    units = units_of(hidden, layers)
    elements = sum(map(sum, units))
    contenders = {
        "plain loop": Plain(units),
        "step": Step(units, FlatAdamW),
        "step, tensor by tensor": Step(units, torch.optim.AdamW),
        "Megatron's host optimizer": Megatron(units),
    }
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, one in contenders.items():
                times[name].append(one.times(clock))
    rates, best = {}, {}
    for name, one in contenders.items():
        taken = times[name][1:]  # behind the first, which makes states and pages
        rates[name] = [one.bytes * elements / sum(own) / 1e9 for own in taken]
        best[name] = one.bytes * elements / sum(map(min, zip(*taken))) / 1e9
        one.close()
    rows = {}
    for name, own in rates.items():
        shares = [rate / plain for rate, plain in zip(own, rates["plain loop"], strict=True)]
        low, _, high = quantiles(shares, n=4)
        rows[name] = {"gb_s": median(own), "share": median(shares), "share_quartiles": [low, high]}
        rows[name] |= {"least_gb_s": best[name], "share_of_least": best[name] / best["plain loop"]}
    return {"threads": threads, "parameters": elements, "tensors": sum(map(len, units)), "rows": rows}


def pages(size: int, threads: int, rounds: int) -> dict:
    """Seconds per GiB, of each the least and the median of all rounds."""
    torch.set_num_threads(threads)
    clocks = [("one thread, shared mapping", _as_before), ("as a run makes them", block_pages.private)]
    clocks.append(("plain loop", lambda size: torch.empty(size, dtype=torch.uint8).fill_(1)))
    taken: dict[str, list[float]] = {name: [] for name, _ in clocks}
    for _ in range(rounds):
        for name, make in clocks:
            begin = time.perf_counter()
            memory = make(size)
            taken[name].append((time.perf_counter() - begin) * 2**30 / size)
            del memory
    large, chosen = block_pages.large_pages(block_pages.OWN_PAGES)
    rows = {name: {"least_s": min(own), "s": median(own)} for name, own in taken.items()}
    return {"threads": threads, "bytes": size, "large_pages": chosen if large else None, "s_per_gib": rows}


def _as_before(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    memory.madvise(block_pages.MADV_POPULATE_WRITE)
    return memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/host_step.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = {
        name: [compare(*sizes, threads, args.rounds) for threads in sorted({*args.threads})]
        for name, sizes in CASES.items()
    }
    made = pages(1 << 29, max(args.threads), args.rounds)
    for name, cases in found.items():
        for case in cases:
            print(f"{name}, {case['tensors']} tensors, threads: {case['threads']}")
            for who, row in case["rows"].items():
                low, high = row["share_quartiles"]
                print(
                    f"  {who:26} {row['gb_s']:6.1f} GB/s, of the plain loop {row['share']:.2f} ({low:.2f} to "
                    f"{high:.2f}); least times: {row['least_gb_s']:.1f} GB/s, {row['share_of_least']:.2f}"
                )
    for who, row in made["s_per_gib"].items():
        print(f"pages, {who:26} {row['s']:.3f} s per GiB, at least {row['least_s']:.3f}")
    about = about_this_machine(load_before=load)
    command = f"python benchmarks/host_step.py --rounds {args.rounds}"
    json_files.save(args.out, {"command": command, "machine": about, "step": found, "pages": made}, indent=1)
    pictures.draw(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
