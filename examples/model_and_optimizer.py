"""The example's model (wrapped for training), its initial values and its optimizer."""

import hashlib

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_ext.megatron import gpt_model, hooks
from megatron_ext.megatron.optimizer_of_args import offload_options
from megatron_ext.runtime.device import has_cuda


def build_model_and_optimizer(args):
    """This rank's model chunks, Megatron's optimizer over them, and their configuration."""
    config = gpt_model.transformer_config(args)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16 or args.fp16,
        overlap_grad_reduce=True,
        overlap_param_gather=args.overlap_param_gather,
        align_param_gather=args.overlap_param_gather and args.num_virtual_stages_per_pipeline_rank is not None,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
    )
    chunks = gpt_model.build_chunks(args, config)
    if args.init_by_name:
        initialize_by_name(chunks, args.seed)
    if has_cuda():
        chunks = [chunk.cuda() for chunk in chunks]
    if args.bf16 or args.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    model = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in model:
        chunk.broadcast_params()
    offload = offload_options() if args.optimizer_cpu_offload else {}
    optimizer = get_megatron_optimizer(adam_config(args, config.params_dtype, **offload), model)
    config.no_sync_func = [chunk.no_sync for chunk in model]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp_config.align_param_gather:
        config.param_sync_func = [chunk.start_param_sync for chunk in model]
    if len(model) == 1:
        config.no_sync_func = config.no_sync_func[0]
        config.param_sync_func = config.param_sync_func[0] if config.param_sync_func else None
    return model, optimizer, config


ADAM = (
    *("lr", "weight_decay", "clip_grad", "bf16", "fp16"),
    *("loss_scale", "initial_loss_scale", "overlap_param_gather"),
)
"""Options that have the same name in Megatron's OptimizerConfig and on the command line."""


def adam_config(args, params_dtype: torch.dtype, **more) -> OptimizerConfig:
    """Configuration of Adam with states that are sharded over the data-parallel ranks."""
    options = {name: getattr(args, name) for name in ADAM} | more
    return OptimizerConfig(optimizer="adam", params_dtype=params_dtype, use_distributed_optimizer=True, **options)


def initialize_by_name(chunks: list[GPTModel], seed: int) -> None:
    """Give matrices initial values that depend only on ``seed`` and the parameter's global name.

    Runs with different parallel sizes then start from the same model. Megatron's own
    initialisation (one random stream per pipeline rank) does not give that. Tensor parallelism is not
    covered, because its ranks hold slices.
    """
    for chunk in chunks:
        offset = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        for name, parameter in chunk.named_parameters():
            if parameter.dim() < 2:
                continue
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + offset)
            digest = hashlib.sha256(f"{seed} {'.'.join(parts)}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            values = torch.randn(parameter.shape, generator=generator) * chunk.config.init_method_std
            hooks.set_values(parameter, values)
