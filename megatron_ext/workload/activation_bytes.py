"""Activations that a GPT's layers keep for backward, counted from sizes (Korthikanti et al. 2022, arXiv 2205.05198).

Counted for fused norms and activation functions, without dropout, and without what a kernel frees within its layer.
"""

from typing import NamedTuple

from megatron_ext.workload.bucket_layout import ITEM_BYTES


class Kept(NamedTuple):
    """Bytes of one micro-batch: until the layer's backward, and what its backward makes anew."""

    activation_bytes: int
    recompute_bytes: int = 0


def kept_by_layer(kind: str, shape, batch, tp: int) -> Kept:
    """What one layer keeps on one tensor-parallel rank.

    Args:
        kind: ``embedding``, ``transformer`` or ``output``.
        shape, batch: a GptShape and a MicroBatch (:mod:`megatron_ext.workload.gpt_shapes`).
    """
    item = ITEM_BYTES[shape.dtype]
    between = item * batch.tokens * shape.hidden // (tp if batch.sequence_parallel else 1)
    if kind == "embedding":
        return Kept(8 * batch.tokens)
    if kind == "output":  # the norm's and the matrix's input, and the softmax in 32 bits
        return Kept(2 * between + 4 * batch.tokens * shape.vocab // tp)
    width, groups = shape.heads * shape.head_dim, shape.query_groups * shape.head_dim
    columns = 2 * width + 2 * groups + (3 if shape.gated else 2) * shape.ffn
    scores = item * batch.tokens * batch.seq_length * batch.score_heads
    whole = 4 * between + item * batch.tokens * columns // tp + scores
    if batch.recompute == "full":
        return Kept(between, whole)
    return Kept(whole - scores, scores) if batch.recompute == "selective" else Kept(whole)
