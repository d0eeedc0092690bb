"""Build a GPT on megatron.core from Megatron's options: for ``describe``, ``measure`` and the example."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from megatron_ext.megatron import expert_options
from megatron_ext.megatron.gpt_arguments import UNEVEN
from megatron_ext.megatron.releases import accepted, accepts, has_all
from megatron_ext.runtime.device import has_cuda

SAME_NAMES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization"),
    *("add_bias_linear", "add_qkv_bias", "tensor_model_parallel_size", "pipeline_model_parallel_size", "bf16", "fp16"),
    *("attention_dropout", "hidden_dropout", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("sequence_parallel", "qk_layernorm"),
)
"""Options that have the same names in Megatron's TransformerConfig and on its command line."""
GROUPS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
GROUPS += ("expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances")
"""Options that have the same names in Megatron's parallel_state."""


def initialize_parallel(args) -> None:
    """Make the process groups for checked options. Collective."""
    sizes = {name: getattr(args, name) for name in GROUPS}
    sizes["virtual_pipeline_model_parallel_size"] = args.num_virtual_stages_per_pipeline_rank
    parallel_state.initialize_model_parallel(**sizes)


def transformer_config(args, **overrides) -> TransformerConfig:
    """Megatron's TransformerConfig for checked options."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    vp = args.num_virtual_stages_per_pipeline_rank
    on_gpu = has_cuda()
    values: dict[str, Any] = dict(
        **{name: getattr(args, name) for name in SAME_NAMES},
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        virtual_pipeline_model_parallel_size=vp,
        microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_virtual_pipeline_stage,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        # Interleaving over two pipeline ranks works only with overlapped p2p.
        overlap_p2p_comm=vp is not None,
        batch_p2p_comm=vp is None,
        # On the CPU a message does not keep a tensor alive whose ``data`` is replaced: freed memory would be sent.
        deallocate_pipeline_outputs=on_gpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=not (args.bf16 or args.fp16),
    )
    first, last, *account = (getattr(args, name, None) for name in UNEVEN)
    uneven = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    values |= {name: layers for name, layers in uneven.items() if layers is not None}
    values |= {name: True for name, asked in zip(UNEVEN[2:], account) if asked}
    if args.num_experts is not None:
        values |= {name: getattr(args, name) for name in expert_options.OPTIONS if has_all(TransformerConfig, name)}
        values |= {"num_moe_experts": args.num_experts}
    values.update(overrides)
    return TransformerConfig(**values)


def layer_spec(args, config: TransformerConfig, **stage) -> Any:
    """The modules of a transformer layer: local PyTorch modules, or Transformer Engine's. With experts, the modules of
    all layers of a ``stage``."""
    if args.num_experts is not None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec as block_spec

        how = accepted(block_spec, normalization=args.normalization, **stage)
        return block_spec(config, use_transformer_engine=args.transformer_impl == "transformer_engine", **how)
    if args.transformer_impl == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    chosen: dict[str, Any] = {} if args.normalization == "LayerNorm" else {"normalization": args.normalization}
    if args.qk_layernorm:
        chosen["qk_layernorm"] = True
    return get_gpt_layer_local_spec(**chosen)


def build_chunks(args, config: TransformerConfig) -> list[GPTModel]:
    """All model chunks of this pipeline rank, in chunk order."""
    vp = args.num_virtual_stages_per_pipeline_rank
    chunks = []
    for chunk in range(vp or 1):
        stage: dict[str, Any] = dict(vp_stage=chunk) if vp else {}
        if vp and not accepts(GPTModel, "vp_stage"):
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            stage = {}
        pre = parallel_state.is_pipeline_first_stage(ignore_virtual=vp is None, **stage)
        post = parallel_state.is_pipeline_last_stage(ignore_virtual=vp is None, **stage)
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=layer_spec(args, config, **stage),
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=pre,
                post_process=post,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                **stage,
            )
        )
    return chunks
