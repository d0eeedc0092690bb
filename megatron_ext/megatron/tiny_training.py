"""A tiny GPT that trains for a few iterations, by Megatron's own gather or by a schedule; the doctor compares the two.

Every rank is a replica. The random tokens are the same in every run, and each rank takes its part of the batch.
Training is deterministic, so two runs differ only in how parameters are gathered.
"""

import gc
import os
import random
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_ext.megatron import gpt_arguments, gpt_model, hooks
from megatron_ext.megatron.describe_model import describe_chunk, workload_of_chunks
from megatron_ext.megatron.equality_check import parameter_digest
from megatron_ext.megatron.lifecycle import STOCK_GATHER
from megatron_ext.megatron.optimizer_of_args import offload_options
from megatron_ext.runtime.device import has_cuda
from megatron_ext.workload.workload import Workload

ITERATIONS = 3

SIZES = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 1000 "
    "--untie-embeddings-and-output-weights --bf16"
).split()

LARGE = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 128".split()
"""206M parameters, so that copies of a group take longer than the operations with which they could race."""


class Trained(NamedTuple):
    """The result of training on this rank: gradient norms as ``float.hex`` writes them, and the sha256 of all
    parameters."""

    grad_norms: tuple[str, ...]
    parameter_sha256: str


def arguments(
    world_size: int,
    ranks_per_node: int,
    *,
    zero_stage: int = 3,
    engine: bool = False,
    nvme=None,
    on_host: bool = False,
    large: bool = False,
    clip_grad: float = 1.0,
):
    """Megatron's arguments of the tiny GPT, or with ``large`` of :data:`LARGE`. With ``on_host`` the optimizer steps on
    the host. Raises InputError."""
    parser = gpt_arguments.OneLineParser(allow_abbrev=False)
    gpt_arguments.add_gpt_arguments(parser)
    gpt_arguments.add_plan_arguments(parser)
    hooks.add_arguments(parser)
    options = [*SIZES, *(LARGE if large else []), f"--zero-stage={zero_stage}", f"--gpus-per-node={ranks_per_node}"]
    options += ["--transformer-impl=transformer_engine"] if engine else []
    options += [f"--user-defined-schedule-nvme-path={nvme}"] if nvme is not None else []
    args = parser.parse_args(options)
    gpt_arguments.check(args, world_size=world_size)
    args.overlap_param_gather = args.use_distributed_optimizer = True
    args.optimizer_cpu_offload, args.clip_grad = on_host, clip_grad
    return args


def initialize() -> None:
    """Make Megatron's process groups, with all ranks as replicas. The default process group must exist. Collective."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def workload_of(args, nvme_slots: int) -> Workload:
    """The workload of the tiny GPT."""
    config = gpt_model.transformer_config(args)
    _seed()
    chunk = gpt_model.build_chunks(args, config)[0].to(config.params_dtype)
    args.limit_nvme_slots = nvme_slots
    return workload_of_chunks(args, [describe_chunk(chunk, 0, 0)])


def train(args, schedule: str, *, stock: bool) -> Trained:
    """Train by ``schedule`` (a path), or by Megatron's own gather at its bucket layout. Collective.

    Raises:
        InputError: the schedule is not for this model, or this machine lacks something that it needs.
    """
    os.environ.pop(STOCK_GATHER, None)
    if stock:
        os.environ[STOCK_GATHER] = "1"
    _seed()
    args.user_defined_schedule = schedule
    hooks.configure(schedule)
    try:
        ddp, optimizer, config = _build(args)
        hooks.on_train_setup(args, [ddp], optimizer, config)
        norms = _iterations(args, ddp, optimizer)
        ddp.disable_forward_pre_hook(param_sync=True)
        digest = parameter_digest([ddp])
    finally:
        hooks.finish()
        os.environ.pop(STOCK_GATHER, None)
    del ddp, optimizer, config
    gc.collect()
    return Trained(tuple(norms), digest)


def _seed() -> None:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _build(args):
    config = gpt_model.transformer_config(args)
    module = gpt_model.build_chunks(args, config)[0]
    module = module.cuda() if has_cuda() else module
    module = Float16Module(config, module)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True
    )
    ddp = DistributedDataParallel(config, ddp_config, module)
    ddp.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=args.clip_grad,
        bf16=True,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        **(offload_options() if args.optimizer_cpu_offload else {}),
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    ddp.train()
    return ddp, optimizer, config


def _iterations(args, ddp, optimizer) -> list[str]:
    norms = []
    for iteration in range(ITERATIONS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=_batches(args, iteration),
            model=ddp,
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        norms.append(float(norm).hex())
    return norms


def _batches(args, iteration: int):
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
    generator = torch.Generator().manual_seed(1000 * iteration + dist.get_rank())
    for _ in range(args.num_microbatches):
        tokens = torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length + 1), generator=generator)
        yield tokens.to(device)


def _forward_step(batches, model):
    tokens = next(batches)
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(tokens.shape[0], length)
    mask = torch.ones(1, 1, length, length, device=tokens.device).tril() < 0.5
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), _loss


def _loss(output):
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}
