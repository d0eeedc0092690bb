"""torch FSDP2 with everything on the host, as its users offload: ``CPUOffloadPolicy`` with page-locked memory and fused
AdamW of the processor. Parameters and states are float32, layers compute in bfloat16, gradients are reduced in float32.

Every transformer layer is a unit, and the root holds the rest. Gradients go to the host behind every backward.
Source: torch.distributed.fsdp.fully_shard.
"""

import trained_model  # isort: skip - Megatron is imported by it
import pretrain_gpt_hybrid as example
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megatron_ext.megatron import gpt_model
from megatron_ext.runtime.device import has_cuda


def _model(args) -> nn.Module:
    example.set_seeds(args)
    (model,) = gpt_model.build_chunks(args, gpt_model.transformer_config(args))
    model = model.to("cuda" if has_cuda() else "cpu").float()  # the values that bfloat16 has
    mesh = init_device_mesh("cuda" if has_cuda() else "cpu", (1,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.decoder.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=CPUOffloadPolicy(pin_memory=has_cuda()))
    return model.train()


def train(args, at_micro_batch) -> list[list[float]]:
    """Losses by iteration and micro-batch of ``args.train_iters`` iterations.

    Args:
        at_micro_batch: ``at_micro_batch(iteration, micro_batch)``, from 0, before each forward.
    """
    model = _model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    backward = lambda loss: (loss / args.num_microbatches).backward()
    return trained_model.train_otherwise(args, model, at_micro_batch, backward, step)
