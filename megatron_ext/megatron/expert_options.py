"""Options of models with experts, under Megatron's names, and which layers have experts."""

import re
from typing import Any

from megatron_ext.formats.errors import option_error


def layer_freq(text: str) -> int | list[int]:
    """``--moe-layer-freq`` as Megatron reads it: N if every Nth layer has experts, or a list with 1 for each layer with
    experts and 0 for the others (``([0]*2+[1]*6)``). Raises ValueError."""
    if not re.fullmatch(r"([][()+*,\s]|(?<!\d)\d{1,4}(?!\d))+", text) or "**" in text:
        raise ValueError(text)
    try:
        return eval(text)
    except (SyntaxError, TypeError):
        raise ValueError(text) from None


COUNTS = ("num_experts", "expert_tensor_parallel_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
DEFAULTS: dict[str, Any] = dict(expert_model_parallel_size=1, moe_router_topk=2, moe_aux_loss_coeff=0.0)
DEFAULTS |= dict(moe_token_dispatcher_type="allgather", moe_router_load_balancing_type="aux_loss")
DEFAULTS |= dict(moe_router_score_function="softmax")
FLAGS = ("moe_grouped_gemm", "moe_pad_expert_input_to_capacity", "moe_router_pre_softmax", "moe_permute_fusion")
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(COUNTS, {"type": int}),
    **{name: {"type": type(default), "default": default} for name, default in DEFAULTS.items()},
    "moe_layer_freq": {"type": layer_freq, "default": 1},
    "moe_expert_capacity_factor": {"type": float},
    "moe_router_dtype": {},
    **dict.fromkeys(FLAGS, {"action": "store_true"}),
}
"""Arguments of ``add_argument`` by the name of the value. From some release on, TransformerConfig uses the same names,
except the first."""


def check(args) -> None:
    """Refuse experts that cannot train.

    Raises:
        InputError: naming the option and its value.
    """
    experts, whole = args.num_experts, args.sequence_parallel or args.tensor_model_parallel_size == 1
    sizes, ep = [name for name, how in OPTIONS.items() if how.get("type") is int], args.expert_model_parallel_size
    for name, wrong, why in (
        *((name, getattr(args, name) is not None and getattr(args, name) < 1, "must be at least 1") for name in sizes),
        ("expert_model_parallel_size", not experts and ep > 1, "needs --num-experts"),
        ("num_experts", (experts or 0) % max(ep, 1), f"does not divide into {ep} expert-parallel ranks"),
        ("moe_router_topk", experts and args.moe_router_topk > experts, f"there are {experts} experts"),
        ("moe_layer_freq", len(pattern(args)) != args.num_layers, f"the model has {args.num_layers} layers"),
        ("sequence_parallel", experts and not whole, "is needed for experts with tensor parallelism"),
    ):
        if wrong:
            raise option_error(name, why, getattr(args, name))


def pattern(args) -> list[int]:
    """1 for each layer with experts and 0 for the others, from Megatron's options or ours."""
    freq = getattr(args, "moe_layer_freq", 1)
    if args.num_experts and not isinstance(freq, int):
        return list(freq)
    return [int(bool(args.num_experts) and number % freq == 0) for number in range(args.num_layers)]


def fewer_layers(pattern: list[int], layers: int) -> list[int]:
    """A pattern of about ``layers`` layers, dense ones first, with the proportions of ``pattern`` and at least one
    layer of each kind that it has."""
    experts, dense = (round(layers * pattern.count(kind) / len(pattern)) for kind in (1, 0))
    return [0] * max(dense, int(0 in pattern)) + [1] * max(experts, int(1 in pattern))
