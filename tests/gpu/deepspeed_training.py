"""DeepSpeed ZeRO-3 with parameters and optimizer on the host, as its users offload: page-locked memory, and its own
AdamW of the processor where that can be built, else torch's fused one. Gradients are added up in bfloat16.

deepspeed is not installed by this repository; the row of ``timed_rows.py`` says so where it is missing.
"""

import os

import trained_model  # isort: skip - Megatron is imported by it
import pretrain_gpt_hybrid as example
import torch

from megatron_ext.megatron import gpt_model
from megatron_ext.runtime.device import has_cuda


def _optimizer(args, parameters):
    settings = {"lr": args.lr, "weight_decay": args.weight_decay}
    if has_cuda():
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(parameters, **settings)
        except Exception as error:  # whatever building an extension raises
            print(f"DeepSpeed's own AdamW cannot be built: {error}", flush=True)
    return torch.optim.AdamW(parameters, fused=True, **settings)


def train(args, at_micro_batch) -> list[list[float]]:
    """Losses by iteration and micro-batch of ``args.train_iters`` iterations.

    Args:
        at_micro_batch: ``at_micro_batch(iteration, micro_batch)``, from 0, before each forward.

    Raises:
        ImportError: deepspeed, or what it needs, is not installed.
    """
    if not has_cuda():
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    import deepspeed_zero3

    example.set_seeds(args)
    (model,) = gpt_model.build_chunks(args, gpt_model.transformer_config(args))
    deepspeed_zero3.pass_hidden_states_by_position()
    on_host = {"device": "cpu", "pin_memory": has_cuda()}
    optimizer = _optimizer(args, list(model.parameters()))
    offload = {"offload_param": on_host, "offload_optimizer": on_host}
    engine = deepspeed_zero3.initialize(model.train(), optimizer, args, offload)

    def backward(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return trained_model.train_otherwise(args, engine, at_micro_batch, backward)
