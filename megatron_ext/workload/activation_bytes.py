"""Activations that a GPT's layers keep for backward, counted from sizes (Korthikanti et al. 2022, arXiv 2205.05198).

Counted for fused norms and activation functions, and without what a kernel frees within its layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ext.workload.bucket_layout import ITEM_BYTES


class Kept(NamedTuple):
    """Bytes of one micro-batch: until the layer's backward, and what its backward makes anew."""

    activation_bytes: int
    recompute_bytes: int = 0


def kept_by_chunk(kinds: Sequence[str], shape, batch, tp: int) -> tuple[tuple[int, ...], int]:
    """What each layer of a chunk keeps on one tensor-parallel rank, and what a backward makes anew at one time.

    Args:
        kinds: ``embedding``, ``transformer`` or ``output`` of every layer.
        shape, batch: a GptShape and a MicroBatch (:mod:`megatron_ext.workload.gpt_shapes`).
    """
    first = kinds.index("transformer") if "transformer" in kinds else 0
    kept = [
        _kept_by_layer(kind, shape, batch._replace(recompute=batch.recompute_of(number - first)), tp)
        for number, kind in enumerate(kinds)
    ]
    activation_bytes = [each.activation_bytes for each in kept]
    anew = max((each.recompute_bytes for each in kept), default=0)
    if batch.recompute == "full" and batch.recompute_method == "uniform":  # of layers together only the first's input
        together = min(batch.recompute_num_layers, kinds.count("transformer"))
        for number, kind in enumerate(kinds):
            if kind == "transformer" and (number - first) % together:
                activation_bytes[number] = 0
        anew *= together
    return tuple(activation_bytes), anew


def _kept_by_layer(kind: str, shape, batch, tp: int) -> Kept:
    item = ITEM_BYTES[shape.dtype]
    elements = batch.tokens * shape.hidden // (tp if batch.sequence_parallel else 1)
    between, masks = item * elements, elements if batch.hidden_dropout else 0
    if kind == "embedding":
        return Kept(8 * batch.tokens + masks)
    if kind == "output":  # the norm's and the matrix's input, and the softmax in 32 bits
        return Kept(2 * between + 4 * batch.tokens * shape.vocab // tp)
    width, groups = shape.heads * shape.head_dim, shape.query_groups * shape.head_dim
    others = width + groups if shape.qk_norm else 0  # copies of query and key, which the norms keep
    if batch.recompute == "selective":  # the value is a part of the matrix's output; what is no longer lies beside it
        made = shape.qk_norm or not shape.positions
        others += width * (made or groups < width) + groups * made
    columns = 2 * width + 2 * groups + (3 if shape.gated else 2) * shape.ffn + others
    scores = item * batch.tokens * batch.seq_length * batch.score_heads
    whole = 4 * between + 2 * masks + item * batch.tokens * columns // tp + scores  # behind attention, behind the MLP
    if batch.recompute == "full":
        return Kept(between, whole)
    return Kept(whole - scores, scores) if batch.recompute == "selective" else Kept(whole)
