"""Options of the example and of ``describe``: a subset of Megatron's options, under the same names."""

import argparse
from typing import Any, NoReturn

from megatron_ext.formats.errors import InputError, flag, option_error
from megatron_ext.megatron import expert_options
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.megatron.recompute import refuse_together
from megatron_ext.workload.batch_ramp import numbers_of_microbatches
from megatron_ext.workload.parallel import LARGEST as MOST_RANKS
from megatron_ext.workload.parallel import Parallel, megatron_order

UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options that give pipeline stages different numbers of layers."""


MODEL_SIZES = dict(num_layers=8, hidden_size=256, num_attention_heads=4, num_query_groups=1, seq_length=128)
MODEL_SIZES |= dict(vocab_size=259, make_vocab_size_divisible_by=128)
MODEL_SIZES |= dict.fromkeys(("ffn_hidden_size", "kv_channels", "max_position_embeddings", "recompute_num_layers"))
PARALLEL_SIZES = {
    "pipeline_model_parallel_size": 1,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "tensor_model_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "microbatch_group_size_per_virtual_pipeline_stage": None,
}
"""Options that are integers, and their defaults."""


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser whose errors are InputErrors: one line, exit code 2. Options of a fork that trains in another
    way are refused as such, before values of options whose names both have."""

    def parse_known_args(self, args=None, namespace=None):
        found = [word for word in args or () if word.startswith("--deepspeed")]
        if found:
            why = "Megatron-DeepSpeed shards parameters in its own way; give the arguments of a script for Megatron-LM"
            raise InputError(why, field=found[0])
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        raise InputError(message, file=self.prog)


def add_gpt_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add model, parallel and precision options under Megatron's names and return ``parser``."""
    model, experts, parallel = map(parser.add_argument_group, ("network size", "experts", "distributed"))
    for group, sizes in ((model, MODEL_SIZES), (parallel, PARALLEL_SIZES)):
        for name, default in sizes.items():
            group.add_argument(flag(name), type=int, default=default)
    for name in ("attention_dropout", "hidden_dropout"):
        model.add_argument(flag(name), type=float, default=0.0)
    for name in "group_query_attention add_qkv_bias qk_layernorm untie_embeddings_and_output_weights swiglu".split():
        model.add_argument(flag(name), action="store_true")
    model.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    model.add_argument("--position-embedding-type", choices=("learned_absolute", "rope"), default="learned_absolute")
    model.add_argument(
        "--use-rotary-position-embeddings", dest="position_embedding_type", action="store_const", const="rope"
    )
    model.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    model.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    model.add_argument("--recompute-granularity", choices=("full", "selective"))
    model.add_argument("--recompute-activations", dest="recompute_granularity", action="store_const", const="selective")
    model.add_argument("--recompute-method", choices=("uniform", "block"))
    for name, how in expert_options.OPTIONS.items():
        experts.add_argument(flag(name), **how)
    parallel.add_argument("--sequence-parallel", action="store_true")
    for name in UNEVEN:
        how: dict[str, Any] = {"action": "store_true"} if name.startswith("account") else {"type": int}
        parallel.add_argument(flag(name), **how)
    parallel.add_argument(
        "--data-parallel-size", type=int, help="Number of replicas; by default what the number of processes leaves."
    )
    parallel.add_argument("--gpus-per-node", type=int, help="Ranks that share one node; by default all of them.")
    parallel.add_argument(
        "--distributed-backend", choices=("nccl", "gloo"), help="Default: nccl where there is a CUDA device, else gloo."
    )
    parallel.add_argument("--distributed-timeout-minutes", type=float, default=10)
    batch = parser.add_argument_group("batch")
    batch.add_argument("--micro-batch-size", type=int, default=1)
    batch.add_argument("--global-batch-size", type=int)
    precision = parser.add_argument_group("precision")
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--fp16", action="store_true")
    return parser


def add_plan_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options for plans that Megatron does not have, and return ``parser``."""
    plan = parser.add_argument_group("plan")
    plan.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=1)
    for name in ("device", "whole-parameter", "host", "pinned-host"):
        plan.add_argument(f"--limit-{name}-bytes", type=int)
    plan.add_argument("--limit-nvme-slots", type=int, default=0)
    return parser


def limits_of(args):
    """The workload's limits, from the options of :func:`add_plan_arguments`."""
    from megatron_ext.workload.workload import Limits

    names = set(Limits.__struct_fields__) - {"nvme_slot_bytes"}
    return Limits(**{name: getattr(args, f"limit_{name}") for name in names})


_OPTIONS = {
    "num_microbatches": "global_batch_size",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}
"""Fields of the parallel sizes -> the options that decide them, if these have other names."""


def check(args, *, world_size: int | None = None) -> None:
    """Refuse values with which a model cannot train, and fill in values that follow from others.

    Args:
        args: parsed options; ``data_parallel_size``, ``global_batch_size``,
            ``num_microbatches`` and others are filled in.
        world_size: number of processes, or None to compute it from the parallel sizes.

    Raises:
        InputError: naming the option and its value.
    """
    _check_sizes(args)
    _check_shapes(args)
    _check_stages(args)
    expert_options.check(args)
    if world_size is not None:
        _check_processes(args, world_size)
    _fill_batch(args)
    if args.recompute_granularity == "full":
        refuse_together(getattr(args, "zero_stage", 1), args.recompute_method, args.recompute_num_layers or 1)
    optimizer_settings(args)  # refuses an optimizer that cannot train these parameters
    try:
        parallel_of(args).check()
    except InputError as error:
        name = (error.field or "").rpartition(".")[2]
        _refuse(args, _OPTIONS.get(name, name), error.message)


def _refuse(args, name: str, message: str) -> NoReturn:
    raise option_error(name, message, getattr(args, name))


CONTEXT = "context_parallel_size"

LARGEST = dict(num_layers=1 << 13, hidden_size=1 << 18, ffn_hidden_size=1 << 20, num_attention_heads=1 << 12)
LARGEST |= dict(num_query_groups=1 << 12, kv_channels=1 << 14, seq_length=1 << 24, vocab_size=1 << 24)
"""Sizes that no model exceeds. They limit the time and memory that a mistyped value costs."""

PARALLEL = (*PARALLEL_SIZES, "micro_batch_size", "data_parallel_size", "global_batch_size", "gpus_per_node")


def _check_sizes(args) -> None:
    """Check that the given sizes are positive and not larger than :data:`LARGEST`."""
    for name, largest in {**LARGEST, **dict.fromkeys((*PARALLEL, CONTEXT), MOST_RANKS)}.items():
        value = getattr(args, name, None)
        if value is not None and value < 1:
            _refuse(args, name, "must be at least 1")
        if value is not None and value > largest:
            _refuse(args, name, f"must be at most {largest}")


def _check_shapes(args) -> None:
    """Check that the layers' shapes fit together, and set the default of ``ffn_hidden_size`` and the sizes of positions
    and vocabulary."""
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        _refuse(args, "num_attention_heads", f"does not divide --hidden-size {args.hidden_size}")
    if args.num_attention_heads % args.tensor_model_parallel_size:
        _refuse(args, "tensor_model_parallel_size", f"does not divide --num-attention-heads {args.num_attention_heads}")
    if args.group_query_attention and args.num_attention_heads % args.num_query_groups:
        _refuse(args, "num_query_groups", f"does not divide --num-attention-heads {args.num_attention_heads}")
    if args.ffn_hidden_size is None and args.swiglu:
        # As Megatron chooses: as many parameters as without the gate, rounded to full tiles.
        said = f"is needed: --hidden-size {args.hidden_size} is too small for --swiglu to choose one"
        args.ffn_hidden_size = int(4 * args.hidden_size * 2 / 3) // 64 * 64 or _refuse(args, "ffn_hidden_size", said)
    if args.fp16 and args.bf16:
        _refuse(args, "fp16", "cannot be combined with --bf16")
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.max_position_embeddings < args.seq_length:
        _refuse(args, "max_position_embeddings", f"is below --seq-length {args.seq_length}")
    if context_ranks(args) > 1 and args.seq_length % (2 * context_ranks(args)):
        _refuse(args, CONTEXT, f"times 2 must divide --seq-length {args.seq_length}")
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple


def _check_stages(args) -> None:
    """Check that layers divide into stages; set ``num_virtual_stages_per_pipeline_rank`` from either of its options."""
    pp, vp = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank
    per_stage, name = args.num_layers_per_virtual_pipeline_stage, "num_virtual_stages_per_pipeline_rank"
    if per_stage is not None:
        name = "num_layers_per_virtual_pipeline_stage"
        if vp is not None:
            _refuse(args, name, f"means the same as --num-virtual-stages-per-pipeline-rank {vp}; give one of them")
        layers = args.num_layers + sum(bool(getattr(args, counted, None)) for counted in UNEVEN[2:])
        if layers % pp:
            _refuse(args, "num_layers", f"does not divide into {pp} pipeline ranks")
        if layers % (pp * per_stage):
            _refuse(args, name, f"does not divide the {layers / pp:g} layers of a pipeline rank")
        vp = args.num_virtual_stages_per_pipeline_rank = layers // (pp * per_stage)
    if vp == 1:
        vp = args.num_virtual_stages_per_pipeline_rank = None
    if vp is not None and pp == 1:
        _refuse(args, name, "needs --pipeline-model-parallel-size of at least 2")
    layers_of_stages(args)


def layers_of_stages(args) -> list[int]:
    """The number of transformer layers of every stage, as Megatron divides them.

    Raises:
        InputError: layers cannot be divided so, or the options contradict each other.
    """
    pp, vp = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank or 1
    first, last, embedding, loss = (getattr(args, name, None) or 0 for name in UNEVEN)
    given = [name for name in UNEVEN if getattr(args, name, None)]
    if pp == 1 and given:
        _refuse(args, given[0], "needs --pipeline-model-parallel-size of at least 2")
    if (first or last) and (embedding or loss):
        _refuse(args, given[0], "cannot be combined with --account-for-embedding-in-pipeline-split or -loss-")
    between, ranks = args.num_layers - first - last + embedding + loss, pp - bool(first) - bool(last)
    if between < 0 or (ranks == 0 and between) or (ranks and between % (ranks * vp)) or first % vp or last % vp:
        left = f"; with {', '.join(map(flag, given))}: {between} layers for {ranks} pipeline ranks" if given else ""
        _refuse(args, "num_layers", f"does not divide into {pp * vp} stages{left}")
    of_ranks = [between // ranks if ranks else 0] * pp
    of_ranks[0], of_ranks[-1] = first or of_ranks[0], last or of_ranks[-1]
    found = [of_ranks[stage % pp] // vp for stage in range(pp * vp)]
    found[0], found[-1] = found[0] - embedding, found[-1] - loss
    if min(found) < 0:
        _refuse(args, "num_layers", f"is too small for {pp * vp} stages with these options")
    return found


def _check_processes(args, world_size: int) -> None:
    """Check that the processes make complete replicas, and set the default of ``data_parallel_size``."""
    pp, tp, cp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size, context_ranks(args)
    replica, sizes = pp * tp * cp, f"pipeline {pp} x tensor {tp}" + (f" x context {cp}" if cp > 1 else "")
    if args.data_parallel_size is None:
        if world_size % replica:
            raise InputError(f"is not a multiple of {sizes}", field="WORLD_SIZE", value=world_size)
        args.data_parallel_size = world_size // replica
    need = replica * args.data_parallel_size
    if world_size != need:
        why = f"need {need} processes: {sizes} x data {args.data_parallel_size}"
        raise InputError(why, field="WORLD_SIZE", value=world_size)


def _fill_batch(args) -> None:
    """Set ``global_batch_size``, ``num_microbatches`` and ``ramp``."""
    dp = args.data_parallel_size = args.data_parallel_size or 1
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * dp * 2 * args.pipeline_model_parallel_size
    *args.ramp, args.num_microbatches = numbers_of_microbatches(args)
    args.global_batch_size = args.num_microbatches * args.micro_batch_size * dp


def parallel_of(args) -> Parallel:
    """The workload's parallel sizes for checked options."""
    vp, group = args.num_virtual_stages_per_pipeline_rank, args.microbatch_group_size_per_virtual_pipeline_stage
    return parallel_sizes_of(args, vp, args.num_microbatches, group, args.gpus_per_node)


def parallel_sizes_of(
    args, vp: int | None, microbatches: int, group: int | None, gpus_per_node: int | None
) -> Parallel:
    """The workload's parallel sizes, from our options or Megatron's. The other arguments have different names in these.
    Context-parallel ranks count as replicas: they hold the same parameters, and Megatron shards over them, too."""
    pp = args.pipeline_model_parallel_size
    return Parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp or 1,
        data_parallel_size=args.data_parallel_size * context_ranks(args),
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        num_microbatches=microbatches,
        microbatch_group_size_per_vp_stage=group if vp else None,
        gpus_per_node=gpus_per_node,
        order="interleaved" if vp else megatron_order(pp, vp),
        expert_model_parallel_size=getattr(args, "expert_model_parallel_size", 1),
        expert_tensor_parallel_size=getattr(args, "expert_tensor_parallel_size", None),
        num_distributed_optimizer_instances=getattr(args, "num_distributed_optimizer_instances", 1),
    )


def context_ranks(args) -> int:
    """The number of ranks that a sequence is divided among, which share parameters as replicas do; 1 in the example."""
    return getattr(args, CONTEXT, 1)


def dtype_of(args) -> str:
    """The parameters' dtype as torch's name."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def shape_of(args):
    """The model's sizes for checked options."""
    from megatron_ext.workload.gpt_shapes import ExpertShape, GptShape

    ffn, experts = args.ffn_hidden_size or 4 * args.hidden_size, None
    if args.num_experts:
        own, shared = args.moe_ffn_hidden_size or ffn, args.moe_shared_expert_intermediate_size or 0
        layers = tuple(expert_options.pattern(args))
        experts = ExpertShape(args.num_experts, args.moe_router_topk, own, layers, shared)
    return GptShape(
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=ffn,
        heads=args.num_attention_heads,
        query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        vocab=args.padded_vocab_size,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        positions=args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0,
        gated=args.swiglu,
        rms_norm=args.normalization == "RMSNorm",
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_bias_linear or args.add_qkv_bias,
        tied=not args.untie_embeddings_and_output_weights,
        dtype=dtype_of(args),
        stage_layers=tuple(layers_of_stages(args)),
        qk_norm=args.qk_layernorm,
        experts=experts,
    )


def batch_of(args):
    """The micro-batch that one step computes on, for checked options."""
    from megatron_ext.workload.gpt_shapes import MicroBatch

    tp, said = args.tensor_model_parallel_size, vars(args).get
    backend = said("attention_backend") or "auto"
    fused = args.transformer_impl != "local" or said("use_flash_attn") or backend in ("flash", "fused")
    fused_loss = "te" if said("cross_entropy_fusion_impl") == "te" else "native"
    return MicroBatch(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        sequence_parallel=said("sequence_parallel", False) and tp > 1,
        recompute=args.recompute_granularity,
        recompute_method=args.recompute_method or "uniform",
        recompute_num_layers=args.recompute_num_layers or 1,
        score_heads=0 if fused and backend not in ("unfused", "local") else args.num_attention_heads // tp,
        hidden_dropout=args.hidden_dropout > 0,
        loss_fusion=fused_loss if said("cross_entropy_loss_fusion") else None,
        context_parallel=context_ranks(args),
        recompute_modules=tuple(said("recompute_modules") or ("core_attn",)),
        attention_dropout=args.attention_dropout > 0,
        local=args.transformer_impl == "local",
        fused_swiglu="no_bias_swiglu_fusion" not in vars(args),
    )
