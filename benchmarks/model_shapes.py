"""Workloads of the shapes that people know: GPT-3 175B, Llama 70B and 405B.

Sizes: GPT-3 (arXiv 2005.14165, table 2.1), Llama 2 70B (arXiv 2307.09288), Llama 3 405B
(arXiv 2407.21783, table 3). Parameters are bfloat16; norms are left out (under 0.01 %).
"""

from math import prod
from typing import NamedTuple

from megatron_ext.workload import model as workload
from megatron_ext.workload.parallel import Parallel


class Shape(NamedTuple):
    """A decoder's sizes. ``kv_heads`` equals ``heads`` without grouped queries; ``gated`` doubles
    the first matrix of the feed-forward part. ``seq`` is the sequence it was trained with."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool
    seq: int

    def layer(self, tp: int) -> dict[str, tuple[int, ...]]:
        """Matrices of one layer as one tensor-parallel rank holds them."""
        head = self.hidden // self.heads
        return {
            "self_attention.linear_qkv.weight": ((self.heads + 2 * max(self.kv_heads, tp)) * head // tp, self.hidden),
            "self_attention.linear_proj.weight": (self.hidden, self.hidden // tp),
            "mlp.linear_fc1.weight": ((1 + self.gated) * self.ffn // tp, self.hidden),
            "mlp.linear_fc2.weight": (self.hidden, self.ffn // tp),
        }

    def vocabulary(self, tp: int) -> tuple[int, int]:
        multiple = 128 * tp
        return (-(-self.vocab // multiple) * multiple // tp, self.hidden)


SHAPES = {
    "gpt3-175b": Shape(96, 12288, 49152, 96, 96, 50257, False, 2048),
    "llama-70b": Shape(80, 8192, 28672, 64, 8, 32000, True, 4096),
    "llama-405b": Shape(126, 16384, 53248, 128, 8, 128256, True, 8192),
}


def make_workload(
    name: str, *, zero_stage: int, pp: int, vp: int, dp: int, tp: int = 1, microbatches: int, tokens: int,
    gpus_per_node: int = 8, device_layers: int = 4, layers: int | None = None,
) -> workload.Workload:  # fmt: skip
    """The workload of a shape.

    Args:
        tokens: of one micro-batch (sequence length times micro-batch size).
        device_layers: with zero stage 3, whole parameters of so many layers (at least the
            vocabulary's matrix) fit beside each other on a device.
        layers: only so many of the shape's layers, without embedding and output.
    """
    shape = SHAPES[name] if layers is None else SHAPES[name]._replace(layers=layers)
    ends = layers is None
    per_chunk = shape.layers // (pp * vp)
    assert per_chunk * pp * vp == shape.layers, f"{pp} x {vp} does not divide {shape.layers} layers"
    parallel = Parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp, data_parallel_size=dp, tensor_model_parallel_size=tp,
        num_microbatches=microbatches, gpus_per_node=gpus_per_node,
        order="interleaved" if vp > 1 else "1f1b" if pp > 1 else "no_pipeline",
    )  # fmt: skip
    chunks = []
    for stage in range(pp * vp):
        kinds = ["embedding"] * (ends and stage == 0) + ["transformer"] * per_chunk + ["output"] * (ends and stage == pp * vp - 1)
        parameters = []
        for index, kind in enumerate(kinds):
            matrices = shape.layer(tp) if kind == "transformer" else {"weight": shape.vocabulary(tp)}
            parameters += [
                workload.Parameter(name=f"{kind}.{index}.{part}", shape=size, dtype="bfloat16", bytes=2 * prod(size), layer=index)
                for part, size in matrices.items()
            ]
        chunks.append(workload.Chunk(pp_rank=stage % pp, model_chunk_id=stage // pp, parameters=tuple(parameters), layer_kinds=tuple(kinds)))
    one_layer = 2 * sum(map(prod, shape.layer(tp).values()))
    room = max(device_layers * one_layer, 2 * prod(shape.vocabulary(tp)) + one_layer) + 2**20  # and buckets' padding
    limits = workload.Limits(device_bytes=room if zero_stage == 3 else None)
    return workload.check(
        workload.Workload(
            schema_version=1, kind="workload", parallel=parallel, zero_stage=zero_stage, chunks=tuple(chunks),
            p2p_bytes=2 * tokens * shape.hidden // tp, limits=limits,
        )
    )  # fmt: skip


def flop_of_kinds(name: str, tokens: int, tp: int = 1) -> dict[str, float]:
    """Forward floating-point operations of one rank for one micro-batch, by layer kind: two a
    parameter and token, attention scores besides. An embedding is a look-up and counts its reads."""
    shape = SHAPES[name]
    scores = 4 * tokens * min(tokens, shape.seq) * shape.hidden / tp / 2  # causal: half of the square
    return {
        "transformer": 2 * tokens * sum(map(prod, shape.layer(tp).values())) + scores,
        "output": 2 * tokens * prod(shape.vocabulary(tp)),
        "embedding": 2.0 * tokens * shape.hidden,
    }


def state_bytes(work: workload.Workload) -> int:
    """Bytes of the fullest rank beside activations: whole (or, with zero stage 3, sharded and
    limited) bfloat16 parameters, float32 gradients, and 12 bytes a parameter of optimizer state."""
    parallel = work.parallel
    numel = max(sum(p.numel for c in work.chunks_of_rank(r) for p in c.parameters) for r in range(parallel.pp))
    if work.zero_stage == 3:
        return (work.limits.device_bytes or 0) + (2 + 4 + 12) * numel // parallel.dp
    return (2 + 4) * numel + 12 * numel // parallel.dp
