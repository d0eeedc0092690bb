"""Training of one model in this process, by a schedule or by its reference, and what came of it, to the last bit.

Between iterations nothing is waited for but what Megatron and the product wait for themselves: losses stay on the
device until the end. An order that is missing has the chance to show.
"""

import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import checkpoint
import pretrain_gpt_hybrid as example
import torch
import torch.distributed as dist
from case_table import ZeroStage
from megatron.core import parallel_state
from model_and_optimizer import build_model_and_optimizer

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import gpt_arguments, gpt_model, hooks
from megatron_ext.megatron.describe_model import describe_chunk
from megatron_ext.megatron.lifecycle import STOCK_GATHER
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.runtime.device import device_of, has_cuda
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.gpt_shapes import p2p_bytes
from megatron_ext.workload.workload import SCHEMA_VERSION, Limits, Workload, check

OVERFLOWS_EVERY = 3
CHUNK = 1 << 24
"""Values that are summed at once."""


class Trained(NamedTuple):
    """What came of training on this rank.

    Attributes:
        losses: by iteration and micro-batch, on the last pipeline stage.
        norms: gradient norms by iteration; None where the step was skipped.
        digests: by parameter, see :func:`digest`.
        seconds: of building, training and leaving.
    """

    losses: list[list[float]]
    norms: list[float | None]
    digests: dict[str, int]
    seconds: float


def parse(options: list[str]):
    """Checked arguments of the example."""
    sys.argv = ["train", "--data-path", "none", *options]
    args = example.parse_args()
    gpt_arguments.check(args, world_size=int(os.environ["WORLD_SIZE"]))
    return args


def workload_of(args, zero_stage: ZeroStage) -> Workload:
    """The workload of the model: every rank builds its chunks, and frees them. Collective."""
    example.set_seeds(args)
    config = gpt_model.transformer_config(args, perform_initialization=False)
    parallel = gpt_arguments.parallel_of(args)
    rank = dist.get_rank() * parallel.pp // dist.get_world_size()
    built = [chunk.to(config.params_dtype) for chunk in gpt_model.build_chunks(args, config)]
    own = [describe_chunk(chunk, rank, index) for index, chunk in enumerate(built)]
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    chunks = {(chunk.model_chunk_id, chunk.pp_rank): chunk for of_rank in everybody for chunk in of_rank}
    item_bytes = ITEM_BYTES[gpt_arguments.dtype_of(args)]
    return check(
        Workload(
            schema_version=SCHEMA_VERSION,
            kind="workload",
            parallel=parallel,
            zero_stage=zero_stage,
            chunks=tuple(chunks[place] for place in sorted(chunks)),
            p2p_bytes=p2p_bytes(parallel, gpt_arguments.batch_of(args), args.hidden_size, item_bytes),
            limits=Limits(nvme_slots=2),
            optimizer=optimizer_settings(args),
        )
    )


def train(args, schedule: str | None, *, stock: bool, overflow: bool = False, at_micro_batch=None) -> Trained:
    """Train by ``schedule`` (a path), or with ``stock`` by Megatron's own gather at its bucket layout. Collective.

    Args:
        args: checked; ``train_iters`` says how long, ``load`` and ``save`` are obeyed as in the example.
        overflow: every third iteration has a loss scale at which gradients overflow.
        at_micro_batch: ``at_micro_batch(iteration, micro_batch)``, from 0, before each forward of a chunk.

    Raises:
        InputError: the schedule is not for this model, or something that it needs is not here.
    """
    os.environ.pop(STOCK_GATHER, None)
    if stock:
        os.environ[STOCK_GATHER] = "1"
    begun = time.monotonic()
    example.set_seeds(args)
    args.user_defined_schedule = schedule
    hooks.configure(schedule, delay=args.delayed_parameter_update, nvme_path=args.user_defined_schedule_nvme_path)
    try:
        model, optimizer, config = build_model_and_optimizer(args)
        args.iteration = checkpoint.load(args.load, model, optimizer) if args.load else 0
        hooks.on_train_setup(args, model, optimizer, config)
        losses, norms = _iterations(args, model, optimizer, overflow, at_micro_batch)
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=True)
        digests = {f"{n} {name}": digest(p) for n, c in enumerate(model) for name, p in c.named_parameters()}
        told = [[loss.item() for loss in row] for row in losses]
    except InputError:  # on all ranks; after any other error the process ends, and ending a run is collective
        hooks.finish(read_later=False)
        raise
    hooks.finish(read_later=False)  # the digests are taken: nobody reads parameters, and their memory is free
    del model, optimizer, config
    gc.collect()
    return Trained(told, norms, digests, time.monotonic() - begun)


def _iterations(args, model, optimizer, overflow: bool, at_micro_batch):
    losses, norms = [], []
    for chunk in model:
        chunk.train()
    for iteration in range(args.iteration, args.train_iters):
        if overflow:
            for one in getattr(optimizer, "chained_optimizers", [optimizer]):
                one.grad_scaler.scale.fill_(2.0**40 if iteration % OVERFLOWS_EVERY == 1 else 2.0**10)
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append([row["lm loss"] for row in run_schedule(args, model, iteration, at_micro_batch)])
        updated, norm, _ = optimizer.step()
        norms.append(float(norm) if updated and norm is not None else None)
        if args.save and (iteration + 1) % args.save_interval == 0:
            example.force_param_sync(model, args)
            checkpoint.save(args.save, iteration + 1, model, optimizer)
    return losses, norms


def run_schedule(args, model, iteration: int, at_micro_batch=None) -> list[dict]:
    """All micro-batches of one iteration in Megatron's order, on tokens that are drawn for it."""
    numbers = itertools.count()

    def forward_step(batches, chunk):
        if at_micro_batch is not None:
            at_micro_batch(iteration, next(numbers))
        return forward(chunk, next(batches)), _loss

    iterators: list[Iterator] = [batches(args, iteration) for _ in model]
    return example.run_schedule(args, model, iterators, step=forward_step)


def forward(model, tokens: torch.Tensor) -> torch.Tensor:
    """What ``model``, or what stands for it, makes of one micro-batch of :func:`batches`: losses by token."""
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(tokens.shape[0], length)
    mask = example.causal_mask(length, tokens.device)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])


def train_otherwise(args, model, at_micro_batch, backward, step=lambda: None) -> list[list[float]]:
    """Losses by iteration and micro-batch of training by something else: ``model`` stands for the model,
    ``backward(loss)`` and, behind an iteration's micro-batches, ``step()`` are its own."""
    losses = []
    for iteration in range(args.train_iters):
        losses.append([])
        for number, tokens in enumerate(batches(args, iteration)):
            at_micro_batch(iteration, number)
            loss = forward(model, tokens).float().mean()
            backward(loss)
            losses[-1].append(loss.detach())
        step()
    return [[loss.item() for loss in row] for row in losses]


def batches(args, iteration: int) -> Iterator[torch.Tensor]:
    """Tokens of this rank's micro-batches, int64, (micro-batch size, sequence + 1), drawn on the device."""
    replica = parallel_state.get_data_parallel_rank()
    device = "cuda" if has_cuda() else "cpu"  # drawn there: a copy of pageable memory waits for all that is queued
    generator = torch.Generator(device).manual_seed(1000 * iteration + replica)
    size = args.micro_batch_size, args.seq_length + 1
    for _ in range(args.num_microbatches):
        yield torch.randint(args.vocab_size, size, generator=generator, device=device)


def _loss(output):
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def free_caches() -> None:
    """Give back what trainings have freed: others share the device, and the host's memory."""
    gc.collect()
    if has_cuda():
        torch.cuda.synchronize()
        device_of(torch.empty(0, device="cuda")).close()  # unlocks blocks that no tensor uses, see page_locked.py
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        free_host = getattr(torch._C, "_host_emptyCache", None)
        if free_host is not None:  # of page-locked memory; not in every release
            free_host()


@torch.no_grad()
def digest(tensor: torch.Tensor) -> int:
    """A sum of all values' bits by odd factors that depend on their places, modulo 2**64, made where the tensor is: one
    that differs is always seen, several but for chance."""
    bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = 0
    for begin in range(0, bits.numel(), CHUNK):
        part = bits[begin : begin + CHUNK].to(torch.int64)
        places = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=part.device)
        total += int((part * (places * 0x1E3779B97F4A7C15 | 1)).sum().item())
    return total % 2**64
