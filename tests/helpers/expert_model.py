"""Gives the example's model experts, by Megatron's own options: for ranks and workloads of tests.

The example trains dense models; what differs with experts is the configuration, the layers' parts and the process
groups.
"""

import copy
import functools
from functools import partial
from unittest import mock

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_ext.megatron import gpt_arguments, gpt_model

OF_CONFIG = (
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_token_dispatcher_type", "moe_layer_freq"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "sequence_parallel"),
)
"""Options that Megatron's TransformerConfig calls as the command line does."""


@functools.cache
def install() -> None:
    """Let the example and ``describe`` know experts in this process, for as long as it lives; may be called again."""
    initialize = parallel_state.initialize_model_parallel
    for module, name, replacement in (
        (gpt_arguments, "add_gpt_arguments", partial(_add_arguments, gpt_arguments.add_gpt_arguments)),
        (gpt_arguments, "check", partial(_check, gpt_arguments.check)),
        (gpt_model, "transformer_config", partial(_config, gpt_model.transformer_config)),
        (gpt_model, "layer_spec", partial(_layer_spec, gpt_model.layer_spec)),
        (parallel_state, "initialize_model_parallel", partial(_initialize, initialize)),
    ):
        mock.patch.object(module, name, replacement).start()
    WrappedTorchNorm.__new__ = staticmethod(partial(_norm, WrappedTorchNorm.__new__))


_given: dict = {}
"""Sizes of the experts that were last asked for."""


def _add_arguments(add, parser):
    add(parser)
    group = parser.add_argument_group("experts")
    for name, default in (
        ("num-experts", None),
        ("expert-model-parallel-size", 1),
        ("expert-tensor-parallel-size", None),
        ("moe-router-topk", 2),
        ("moe-ffn-hidden-size", None),
        ("moe-shared-expert-intermediate-size", None),
        ("moe-layer-freq", 1),
    ):
        group.add_argument(f"--{name}", type=int, default=default)
    group.add_argument("--moe-token-dispatcher-type", default="alltoall")
    group.add_argument("--moe-router-load-balancing-type", default="aux_loss")
    group.add_argument("--moe-aux-loss-coeff", type=float, default=1e-2)
    group.add_argument("--sequence-parallel", action="store_true")
    return parser


def _check(check, args, **how):
    _given.update({name: getattr(args, name) for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")})
    check(args, **how)


def _config(transformer_config, args, **overrides):
    if getattr(args, "num_experts", None) is None:  # arguments that were parsed without these options
        return transformer_config(args, **overrides)
    experts = {name: getattr(args, name) for name in OF_CONFIG} | {"num_moe_experts": args.num_experts}
    return transformer_config(args, **experts, add_bias_linear=False, **overrides)


def _layer_spec(layer_spec, args, config):
    if getattr(args, "num_experts", None) is None:
        return layer_spec(args, config)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)


def _norm(new, cls, config, *args, **kwargs):
    """torch's norms compute on a part of a sequence as on all of it; Megatron then adds their gradients up."""
    whole = copy.copy(config)
    whole.sequence_parallel = False
    norm = new(cls, whole, *args, **kwargs)
    for parameter in norm.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel
    return norm


def _initialize(initialize, **sizes):
    return initialize(**sizes, **_given)
