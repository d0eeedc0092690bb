"""A model larger than a device budget on one GPU: our routes beside torch FSDP2 with CPU offload.

    python benchmarks/gpu_streaming.py --cost-table T --budget-bytes 2147483648 --out gpu_streaming.json

NOT YET RUN ON A GPU. Residual feed-forward layers (two products and a norm, bfloat16) run forward
and backward; at no time are more whole parameters on the device than the budget. Three ways,
interleaved: ``cpu`` (host copy to device, the next layers under way while one computes), ``nvme`` (drive,
staging slot, device; with --nvme-path) and torch FSDP2 with CPUOffloadPolicy. Each copies the
gradients to the host. Losses and gradient norms are compared. --device cpu only checks that this
program works; its times mean nothing.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
from machine import about_this_machine
from rich.console import Console
from rich.table import Table
from torch import nn

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.estimates import Costs
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.report.spread import summarize, warm_up
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, FreedGroup, Residency, State
from megatron_ext.runtime.host_pool import COPY, DRIVE, HostPool
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.routes.drive_copy import DriveCopy
from megatron_ext.runtime.routes.host_copy import HostCopy
from megatron_ext.workload.drive_reads import DriveReads


class Layer(nn.Module):
    """A residual feed-forward layer of 8 x hidden squared parameters."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_layer(number: int, hidden: int) -> Layer:
    """The same values whoever asks."""
    torch.manual_seed(1000 + number)
    return Layer(hidden).to(torch.bfloat16)


class Streamed:
    """The layers, each one group; a look-ahead as deep as the budget allows."""

    def __init__(self, args, device: torch.device, route: str):
        self.clock, self.residency = Clock(), Residency()
        self.layers, self.groups = [], []
        alone = lambda value: [value]  # the only rank of its node
        for number in range(args.layers):
            layer = make_layer(number, args.hidden_size)
            parameters = list(layer.parameters())
            flat = torch.cat([p.detach().flatten() for p in parameters])
            whole = flat.to(device) if device.type == "cuda" else flat.clone()
            group = FreedGroup(number, f"layer {number}", whole, 0, 1, self.residency)
            group.shard = flat  # it lives on the host: that is where an offloaded optimizer would update it
            offset = 0
            for p in parameters:
                p.data = whole[offset : offset + p.numel()].view(p.shape)
                offset += p.numel()
            group.drop()
            self.layers.append(layer)
            self.groups.append(group)
        self.bytes = sum(group.bytes for group in self.groups)
        largest = max(group.bytes for group in self.groups)
        self.ahead = args.budget_bytes // largest - 1
        if self.ahead < 0:
            raise InputError(f"one layer has {largest} bytes", field="--budget-bytes", value=args.budget_bytes)
        transport = device_of(self.groups[0].whole)
        hosted = set(range(args.layers)) if route == "cpu" else set()
        self.pool = HostPool(self.groups, hosted, set(), 0, 1, alone, transport)
        self.pool.pin()
        self.nvme, self.issuer = None, Issuer()
        how = (transport, self.issuer, self.clock, Faults())
        if route == "cpu":
            for group in self.groups:
                self.pool.copies[group.index].copy_(group.shard)
            self.route = HostCopy(self.pool, *how)
        else:
            self.slots = max(min(self.ahead, 4), 1)
            self.nvme = NvmePool(
                args.nvme_path,
                self.groups,
                0,
                alone,
                slots=self.slots,
                slot_bytes=largest,
                settings=DriveReads(),
                device=transport,
            )
            for group in self.groups:
                self.nvme.write(group, 0, group.shard)
                self.nvme.flush(group)
            self.route = DriveCopy(self.nvme, self.pool, *how, self.slots)
        for group in self.groups:
            for where in (COPY, DRIVE):
                self.pool.flags[group.index, where][0].store(self.clock.version)
        sizes = [p.shape for p in self.layers[0].parameters()]
        self.gradients = [
            [torch.empty(size, dtype=torch.bfloat16, pin_memory=device.type == "cuda") for size in sizes]
            for _ in self.layers
        ]

    def _begin(self, order: list[int], position: int) -> None:
        """Issue what fits beside the layer at ``position``; a layer comes again only once it has gone."""
        while self.begun < len(order) and self.begun - position <= self.ahead:
            group = self.groups[order[self.begun]]
            if group.state is not State.SHARDED:
                return
            if self.nvme is not None:
                self.route.stage_in(group, self.begun % self.slots)
            group.unshard(self.route.issue, self.clock)
            self.begun += 1

    def _wait(self, number: int) -> None:
        self.groups[number].wait(self.clock)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """One forward and backward, complete on the device; the loss."""
        count = len(self.layers)
        order = list(range(count)) + list(range(count))[::-1]
        # The last layer of forward is the first of backward: it is brought once.
        order.pop(count)
        self.begun = 0
        inputs, outputs = [], []
        for position, number in enumerate(order):
            self.issuer.poll()
            self._begin(order, position)
            self._wait(number)
            if position < count:
                inputs.append(x.detach().requires_grad_())
                outputs.append(self.layers[number](inputs[-1]))
                x = outputs[-1]
            if position == count - 1:
                loss = x.float().square().mean()
                (flow,) = torch.autograd.grad(loss, x)
            if position >= count - 1:
                parameters = list(self.layers[number].parameters())
                flow, *gradients = torch.autograd.grad(outputs.pop(), [inputs.pop(), *parameters], flow)
                for host, gradient in zip(self.gradients[number], gradients):
                    host.copy_(gradient, non_blocking=True)
            self.groups[number].reshard()
        if x.is_cuda:
            torch.cuda.synchronize()
        return loss

    def norm(self) -> float:
        """Of the gradients of the last step. Takes the host longer than a step takes, so it is not part of one."""
        return norm_of(g for layer in self.gradients for g in layer)

    def close(self) -> None:
        self.route.close()
        if self.nvme is not None:
            self.nvme.close()
        self.pool.close()


def norm_of(gradients) -> float:
    return math.sqrt(sum(g.float().square().sum().item() for g in gradients))


class Sharded:
    """The same layers under torch FSDP2 with CPU offload, one rank. With one rank FSDP2 copies on the stream that
    computes, without look-ahead: what it takes above ``copies alone`` is compute that nothing hides."""

    def __init__(self, args, device: torch.device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
        mesh = init_device_mesh(device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        self.model = nn.Sequential(*(make_layer(number, args.hidden_size) for number in range(args.layers)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad()
        loss = self.model(x).float().square().mean()
        loss.backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        return loss.detach()

    def norm(self) -> float:
        return norm_of(p.grad.to_local() for p in self.model.parameters())

    def close(self) -> None:
        torch.distributed.destroy_process_group()


def one_way(name: str, args, device: torch.device, x: torch.Tensor) -> dict:
    """Steps of one way; times without warm-up, and the device's peak."""
    way = Sharded(args, device) if name == "fsdp2-offload" else Streamed(args, device, name)
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(args.iters):
            start = time.perf_counter_ns()
            loss = way.step(x)
            times.append((time.perf_counter_ns() - start) / 1e3)
        row = {
            "way": name,
            "step_us": summarize(times[warm_up(args.iters) :]).as_json(),
            "loss": loss.item(),
            "grad_norm": way.norm(),
        }
        if isinstance(way, Streamed):
            row |= {"whole_peak_bytes": way.residency.peak, "model_bytes": way.bytes, "ahead": way.ahead}
        row["device_peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        return row
    finally:
        way.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--cost-table", type=Path, default=None, help="Measured on this GPU: says how long the copies alone would take."
    )
    add("--budget-bytes", type=int, default=2 << 30, help="Whole parameters on the device at a time.")
    add("--layers", type=int, default=24)
    add("--hidden-size", type=int, default=4096)
    add("--tokens", type=int, default=1024)
    add("--iters", type=int, default=12)
    add("--nvme-path", type=Path, default=None)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise InputError("torch sees no CUDA device here", field="--device", value="cuda")
        result = run(args)
    except InputError as error:
        print(f"gpu_streaming: {error}", file=sys.stderr)
        return 2
    json_files.save(args.out, result, indent=1)
    show(result)
    return 0


def run(args) -> dict:
    load = os.getloadavg()[0]
    device = torch.device(args.device)
    torch.manual_seed(7)
    x = torch.randn(args.tokens, args.hidden_size, dtype=torch.bfloat16).to(device)
    rows = [one_way(name, args, device, x) for name in ("cpu", *(["nvme"] if args.nvme_path else []), "fsdp2-offload")]
    streamed = rows[0]
    if streamed["model_bytes"] <= args.budget_bytes:
        raise InputError(
            f"the model has only {streamed['model_bytes']} bytes: it fits",
            field="--budget-bytes",
            value=args.budget_bytes,
        )
    if args.cost_table:
        costs = Costs(cost.load(args.cost_table), extrapolate=True)
        layer = streamed["model_bytes"] // args.layers
        for row in rows:
            if row["way"] in costs.routes:
                row["copies_alone_us"] = (2 * args.layers - 1) * costs.gather_us(row["way"], layer)
    return {
        "about": about_this_machine(load_before=load),
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu: only a check of the program",
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
            if key not in ("out", "cost_table", "nvme_path")
        },
        "rows": rows,
    }


def show(result: dict) -> None:
    table = Table(
        "way",
        "step ms (p10 - p90)",
        "copies alone ms",
        "whole parameters at most, MB",
        "device peak MB",
        "loss",
        "gradient norm",
        title=f"streaming on {result['device']}",
    )
    for row in result["rows"]:
        us = row["step_us"]
        cells = [row.get("copies_alone_us"), row.get("whole_peak_bytes"), row["device_peak_bytes"]]
        table.add_row(
            row["way"],
            f"{us['median_us'] / 1e3:.1f} ({us['p10_us'] / 1e3:.1f} - {us['p90_us'] / 1e3:.1f})",
            *("" if value is None else f"{value / scale:.1f}" for value, scale in zip(cells, (1e3, 1e6, 1e6))),
            f"{row['loss']:.6f}",
            f"{row['grad_norm']:.6f}",
        )
    console = Console(width=150)
    console.print(table)
    console.print(
        "fsdp2-offload: with one rank FSDP2 copies on the stream that computes, so nothing of it is hidden; hold a "
        "way to 'copies alone' too"
    )


if __name__ == "__main__":
    sys.exit(main())
