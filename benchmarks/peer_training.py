"""The training that every peer does: the main job's GPT, initial values, samples and optimizer.

A peer is a script of its own, started once a rank, which takes the options of
examples/pretrain_gpt_hybrid.py behind a way of its own, and writes the same kind of metrics file:
per iteration the loss, the gradient norm and the time; and what a rank held in an iteration more, see peer_census.py.
"""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import corpus
import pretrain_gpt_hybrid as job  # first: it makes Megatron work without a CUDA device
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from model_and_optimizer import initialize_by_name
from peer_census import Census

from megatron_ext.formats import json_files
from megatron_ext.megatron import gpt_arguments, gpt_model

FIGURES = ("loss", "grad_norm", "iteration_us")


class Peer(ABC):
    """What a peer must offer."""

    def __init__(self, args, way: str, config, chunks):
        self.args, self.way, self.config, self.chunks = args, way, config, chunks

    @abstractmethod
    def forward_backward(self, iterator) -> list[dict]:
        """All micro-batches of an iteration, gradients accumulated and averaged over replicas."""

    @abstractmethod
    def step(self) -> float:
        """Clip, update, forget the gradients; the gradient norm."""

    def on_host(self) -> Iterable[torch.Tensor]:
        """What would rest in host memory, had the machine a GPU."""
        return ()


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters, their gradients and the states of an optimizer of torch's."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from (one for one in (parameter, parameter.grad) if one is not None)
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def adam(args, named_parameters) -> torch.optim.AdamW:
    """The optimizer that Megatron uses without a GPU, with its settings: no weight decay for vectors.

    foreach: one call for all parameters, which is how it is fastest for many small ones.
    """
    decayed, others = [], []
    for name, parameter in named_parameters:
        (others if name.endswith(".bias") or parameter.dim() == 1 else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.999), eps=1e-8, foreach=True)


def batch_loss(model, batch) -> torch.Tensor:
    """Loss of one micro-batch, computed as the main job does."""
    mask = job.causal_mask(batch["tokens"].shape[1], batch["tokens"].device)
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return job.loss_func(batch["loss_mask"], output)[0]


def train(peer: Peer, args, dataset) -> dict:
    """Train as the main job's loop does, with the same points in time; the census looks at the last iteration."""
    iterator = job.batches_of(args, dataset)
    metrics = {name: [] for name in FIGURES}
    census = Census(peer.chunks, peer.on_host)
    for number in range(args.train_iters):
        if number == args.train_iters - 1:
            census.begin()
        dist.barrier()
        start = time.perf_counter_ns()
        losses = peer.forward_backward(iterator)
        norm = peer.step()
        end = time.perf_counter_ns()
        for name, value in zip(FIGURES, (job.mean_loss(losses), norm, (end - start) / 1e3)):
            metrics[name].append(value)
    metrics["iteration_us"].pop()
    metrics["held"] = census.end()
    return metrics


def merge(everybody: list[dict]) -> dict:
    """One file for all ranks: losses of the first, of times and bytes the largest."""
    merged = dict(everybody[0])
    merged["iteration_us"] = [max(values) for values in zip(*(metrics["iteration_us"] for metrics in everybody))]
    merged["held"] = max(metrics["held"] for metrics in everybody)
    return merged


def main(ways: dict[str, type[Peer]]) -> None:
    """Run one rank of a peer and leave; ``ways``: the class by the first argument."""
    way = sys.argv.pop(1)
    args = job.parse_args()
    gpt_arguments.check(args, world_size=int(os.environ["WORLD_SIZE"]))
    corpus.check(args.data_path, args.seq_length, args.vocab_size)
    job.initialize(args)
    config = gpt_model.transformer_config(args)
    chunks = gpt_model.build_chunks(args, config)
    initialize_by_name(chunks, args.seed)
    for chunk in chunks:
        chunk.train()
    peer = ways[way](args, way, config, chunks)
    metrics = train(peer, args, job.build_datasets(args)[0])
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, metrics)
    if dist.get_rank() == 0:
        json_files.save(args.metrics_path, merge(everybody), indent=1)
    dist.barrier()
    os._exit(0)  # threads of collectives may abort a normal end


def data_parallel_mesh():
    """torch's DeviceMesh over this rank's data-parallel group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu")
