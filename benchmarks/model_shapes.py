"""Workloads of the shapes that people know: GPT-3 175B, Llama 70B and 405B.

Sizes: GPT-3 (arXiv 2005.14165, table 2.1), Llama 2 70B (arXiv 2307.09288), Llama 3 405B
(arXiv 2407.21783, table 3). Parameters are bfloat16.
"""

from math import prod

from msgspec.structs import replace

from megatron_ext.workload import workload
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.parallel import Parallel, megatron_order


def llama(layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> GptShape:
    """Eight groups of queries, a gate, no bias, an output matrix of its own. ``vocab`` is padded for TP 8."""
    return GptShape(
        layers,
        hidden,
        ffn,
        heads,
        8,
        vocab,
        128,
        gated=True,
        rms_norm=True,
        linear_bias=False,
        qkv_bias=False,
        tied=False,
    )


SHAPES = {
    "gpt3-175b": GptShape(96, 12288, 49152, 96, 96, 51200, 128, positions=2048),
    "llama-70b": llama(80, 8192, 28672, 64, 32768),
    "llama-405b": llama(126, 16384, 53248, 128, 129024),
}
SEQUENCES = {"gpt3-175b": 2048, "llama-70b": 4096, "llama-405b": 8192}
"""Sequence lengths that the models were trained with."""


def make_workload(
    name: str,
    *,
    zero_stage: int,
    pp: int,
    vp: int,
    dp: int,
    tp: int = 1,
    microbatches: int,
    tokens: int,
    gpus_per_node: int = 8,
    device_layers: int = 4,
    layers: int | None = None,
) -> workload.Workload:
    """The workload of a shape.

    Args:
        tokens: of one micro-batch (sequence length times micro-batch size).
        device_layers: with zero stage 3, whole parameters of so many layers (at least the
            vocabulary's matrix) fit together on a device.
        layers: only so many of the shape's layers, without embedding and output.
    """
    shape = SHAPES[name] if layers is None else SHAPES[name]._replace(layers=layers)
    parallel = Parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        data_parallel_size=dp,
        tensor_model_parallel_size=tp,
        num_microbatches=microbatches,
        gpus_per_node=gpus_per_node,
        order=megatron_order(pp, vp),
    )
    one_layer, vocabulary = (2 * sum(map(prod, sizes)) for sizes in (shape.layer(tp).values(), [matrix(shape, tp)]))
    largest = max(device_layers * one_layer, vocabulary + one_layer) + 2**20  # and buckets' padding
    limits = workload.Limits(whole_parameter_bytes=largest if zero_stage == 3 else None)
    batch = MicroBatch(tokens, sequence_parallel=tp > 1)
    work = gpt_workload(shape, parallel, batch, zero_stage=zero_stage, limits=limits)
    return work if layers is None else workload.check(replace(work, chunks=tuple(map(without_ends, work.chunks))))


def without_ends(chunk: workload.Chunk) -> workload.Chunk:
    """The chunk's transformer layers alone."""
    first = chunk.layer_kinds.index("transformer")
    kept = [replace(p, layer=p.layer - first) for p in chunk.parameters if chunk.layer_kinds[p.layer] == "transformer"]
    kinds = tuple(kind for kind in chunk.layer_kinds if kind == "transformer")
    saved = chunk.activation_bytes[first : first + len(kinds)]
    return replace(chunk, parameters=tuple(kept), layer_kinds=kinds, activation_bytes=saved)


def matrix(shape: GptShape, tp: int) -> tuple[int, int]:
    """The vocabulary's matrix as one tensor-parallel rank holds it."""
    return shape.vocab // tp, shape.hidden


def flop_of_kinds(name: str, tokens: int, tp: int = 1) -> dict[str, float]:
    """Forward floating-point operations of one rank for one micro-batch, by layer kind: two a
    parameter and token, attention scores besides. An embedding is a look-up and counts its reads."""
    shape = SHAPES[name]
    scores = 4 * tokens * min(tokens, SEQUENCES[name]) * shape.hidden / tp / 2  # causal: half of the square
    return {
        "transformer": 2 * tokens * sum(map(prod, shape.layer(tp).values())) + scores,
        "output": 2 * tokens * prod(matrix(shape, tp)),
        "embedding": 2.0 * tokens * shape.hidden,
    }


def state_bytes(work: workload.Workload) -> int:
    """Bytes of the fullest rank beside activations: whole (or, with zero stage 3, sharded and
    limited) bfloat16 parameters, float32 gradients, and 12 bytes a parameter of optimizer state."""
    parallel = work.parallel
    numel = max(sum(p.numel for c in work.chunks_of_rank(r) for p in c.parameters) for r in range(parallel.pp))
    if work.zero_stage == 3:
        return (work.limits.whole_parameter_bytes or 0) + (2 + 4 + 12) * numel // parallel.dp
    return (2 + 4) * numel + 12 * numel // parallel.dp
