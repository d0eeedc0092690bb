"""The training that every peer does: the main job's GPT, initial values, samples and optimizer.

A peer is a script of its own, started once a rank, which takes the options of
examples/pretrain_gpt_hybrid.py, ``--way`` of its own, and writes the same kind of metrics file:
per iteration the loss, the gradient norm, the time, and the training thread's time in gathers.
"""

import functools
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import corpus
import pretrain_gpt_hybrid as job  # first: it makes Megatron work without a CUDA device
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from model_and_optimizer import initialize_by_name

from megatron_ext.formats import json_files
from megatron_ext.megatron import gpt_arguments, gpt_model

FIGURES = ("loss", "grad_norm", "iteration_us", "optimizer_us", "gather_us", "exposed_us")


class GatherClock:
    """The training thread's time in gathers, and the part of it in which it waits for data.

    Functions of a peer are replaced by ones that note how long they took. Only the outermost
    one counts, so a function that calls another is not counted twice.
    """

    def __init__(self):
        self.gather_ns = self.exposed_ns = 0
        self._depth = 0

    def gathering(self, owner, name: str) -> None:
        """Count time in ``owner.name`` as gathering."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args, **kwargs):
            self._depth += 1
            start = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.gather_ns += time.perf_counter_ns() - start

        setattr(owner, name, timed)

    def wait(self, work) -> None:
        """Wait for a collective; the time counts as exposed."""
        start = time.perf_counter_ns()
        work.wait()
        self.exposed_ns += time.perf_counter_ns() - start

    def waiting(self, owner, name: str) -> None:
        """Count time in ``owner.name`` as exposed."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args, **kwargs):
            start = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self.exposed_ns += time.perf_counter_ns() - start

        setattr(owner, name, timed)

    def take(self) -> tuple[float, float]:
        """Microseconds (gathering, exposed) since the last call."""
        taken = self.gather_ns / 1e3, self.exposed_ns / 1e3
        self.gather_ns = self.exposed_ns = 0
        return taken


class WholeBytes:
    """Bytes of whole parameters that a peer holds, from the issue of a gather to its release."""

    def __init__(self):
        self.now = self.peak = 0
        self._held: dict[int, int] = {}

    def hold(self, key, size: int) -> None:
        """``key`` is whole, or on its way."""
        if key not in self._held:
            self._held[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def release(self, key) -> None:
        """``key`` is sharded again."""
        self.now -= self._held.pop(key, 0)


class Peer(ABC):
    """What a peer must offer.

    Attributes:
        clock: its :class:`GatherClock`.
        ways: values of ``--way``.
    """

    ways: tuple[str, ...] = ()

    def __init__(self, args, way: str, config, chunks):
        self.args, self.way, self.config, self.chunks = args, way, config, chunks
        self.clock, self.whole = GatherClock(), WholeBytes()

    @abstractmethod
    def forward_backward(self, iterator) -> list[dict]:
        """All micro-batches of an iteration, gradients accumulated and averaged over replicas."""

    @abstractmethod
    def step(self) -> float:
        """Clip, update, forget the gradients; the gradient norm."""

    def whole_peak_bytes(self, iterator) -> int:
        """Most bytes of whole parameters on one rank. May train one more iteration to count them."""
        return self.whole.peak


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
    """Train as the main job's loop does, with the same points in time."""
    iterator = job.batches_of(args, dataset)
    metrics = {name: [] for name in FIGURES}
    for number in range(args.train_iters):
        dist.barrier()
        peer.clock.take()
        start = time.perf_counter_ns()
        losses = peer.forward_backward(iterator)
        computed = time.perf_counter_ns()
        norm = peer.step()
        end = time.perf_counter_ns()
        gather_us, exposed_us = peer.clock.take()
        values = (job.mean_loss(losses), norm, (end - start) / 1e3, (end - computed) / 1e3, gather_us, exposed_us)
        for name, value in zip(FIGURES, values):
            metrics[name].append(value)
        if number == 0:  # a peer may hold more while it looks at the model for the first time
            peer.whole.peak = peer.whole.now
    metrics["whole_peak_bytes"] = peer.whole_peak_bytes(iterator)
    return metrics


def merge(everybody: list[dict]) -> dict:
    """One file for all ranks: losses of the first, of times and bytes the largest."""
    merged = dict(everybody[0])
    for name in ("iteration_us", "optimizer_us", "gather_us", "exposed_us"):
        merged[name] = [max(values) for values in zip(*(metrics[name] for metrics in everybody))]
    merged["whole_peak_bytes"] = max(metrics["whole_peak_bytes"] for metrics in everybody)
    return merged


def main(make_peer) -> None:
    """Run one rank of a peer and leave; ``make_peer`` is its class."""
    way = sys.argv.pop(1)
    assert way in make_peer.ways, f"{way!r} is none of {make_peer.ways}"
    args = job.parse_args()
    gpt_arguments.check(args, world_size=int(os.environ["WORLD_SIZE"]))
    corpus.check(args.data_path, args.seq_length, args.vocab_size)
    job.initialize(args)
    config = gpt_model.transformer_config(args)
    chunks = gpt_model.build_chunks(args, config)
    initialize_by_name(chunks, args.seed)
    for chunk in chunks:
        chunk.train()
    peer = make_peer(args, way, config, chunks)
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
