"""Options with which ``layer_runners`` builds the layers that a checkout's own script trains.

The checkout's parser knows every option of its release; ``layer_runners`` knows those of ``gpt_arguments``. So
Megatron's arguments are translated into the latter, and the layers are compared by their bytes.
"""

from collections import defaultdict

from megatron_ext.formats.errors import InputError, flag
from megatron_ext.megatron import expert_options, gpt_arguments
from megatron_ext.workload.gpt_shapes import gpt_workload
from megatron_ext.workload.workload import Chunk, Workload

VALUED = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length", "max_position_embeddings"),
    *("position_embedding_type", "normalization", "attention_dropout", "hidden_dropout", "transformer_impl"),
    *("tensor_model_parallel_size", "micro_batch_size"),
)
FLAGS = ("add_qkv_bias", "qk_layernorm", "swiglu", "untie_embeddings_and_output_weights", "bf16", "fp16")
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""Options that are taken unchanged from Megatron's own arguments."""


def options_of_layers(args) -> tuple[str, ...]:
    """The options of one pipeline rank's layers, from Megatron's own validated arguments."""
    layers = max(args.num_layers // args.pipeline_model_parallel_size, 1)
    valued = {"num_layers": layers, "vocab_size": args.padded_vocab_size, "make_vocab_size_divisible_by": 1}
    valued |= {name: getattr(args, name) for name in VALUED}
    flags = {name: getattr(args, name, False) for name in FLAGS}
    flags["disable_bias_linear"] = not args.add_bias_linear
    if args.group_query_attention:
        flags["group_query_attention"], valued["num_query_groups"] = True, args.num_query_groups
    if args.recompute_granularity:
        given = {name: getattr(args, name) for name in RECOMPUTE}
        valued |= {name: value for name, value in given.items() if value is not None}
        if args.recompute_method == "block":  # counts layers of a chunk; here a rank's layers are one chunk
            chunks = args.virtual_pipeline_model_parallel_size or 1
            valued["recompute_num_layers"] = min(args.recompute_num_layers * chunks, layers)
    if getattr(args, "num_experts", None):
        pattern = expert_options.fewer_layers(expert_options.pattern(args), layers)
        valued["num_layers"], flags["sequence_parallel"] = len(pattern), args.sequence_parallel
        for name, how in expert_options.OPTIONS.items():
            value = pattern if name == "moe_layer_freq" else getattr(args, name, None)
            into = flags if "action" in how else valued
            if isinstance(value, list) and name != "moe_layer_freq":  # a list of several values, in later releases
                value = value[0]
            if value is not None:
                into[name] = value
    found = [text for name, value in valued.items() for text in (flag(name), str(value))]
    return (*found, *(flag(name) for name, given in flags.items() if given))


def require_known_layers(options: tuple[str, ...], workload: Workload) -> None:
    """Refuse a model whose layers ``layer_runners`` would build differently from the script.

    Args:
        options: the result of :func:`options_of_layers`.
        workload: the workload of the model that the script builds.

    Raises:
        InputError: naming the first kind of layer that differs, or the option that ``layer_runners`` does not know.
    """
    from megatron_ext.megatron.ignored_options import parse

    args = parse(options, verb="measure", data_parallel_size=workload.parallel.world_size)
    built = gpt_workload(gpt_arguments.shape_of(args), gpt_arguments.parallel_of(args), gpt_arguments.batch_of(args))
    known, there = _layer_bytes(built.chunks), _layer_bytes(workload.chunks)
    for kind, sizes in there.items():
        # A tied matrix is a parameter of the output layer only on a pipeline rank without the embedding.
        if kind != "output" and not sizes <= known.get(kind, set()):
            raise InputError(
                f"measure cannot build this model's layers of kind {kind!r} (they have {max(sizes)} bytes, those it "
                f"builds {max(known.get(kind, {0}))}); name a function that can, or plan with a table of "
                "`cost estimate --hardware NAME`, which needs no layers",
                field="--modules",
            )


def _layer_bytes(chunks: tuple[Chunk, ...]) -> dict[str, set[int]]:
    """By kind of layer, the sizes in bytes that occur."""
    found: dict[str, set[int]] = defaultdict(set)
    for chunk in chunks:
        sizes = [0] * len(chunk.layer_kinds)
        for parameter in chunk.parameters:
            sizes[parameter.layer] += parameter.bytes
        for kind, size in zip(chunk.layer_kinds, sizes):
            found[kind].add(size)
    return found
