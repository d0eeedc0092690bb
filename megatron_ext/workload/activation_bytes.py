"""Activations that a GPT's layers keep for backward, counted from sizes (Korthikanti et al. 2022, arXiv 2205.05198).

The count is for fused norms and fused activation functions. It leaves out tensors that a kernel frees within its layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.parallel import Parallel

ROUTED = 30
"""Bytes that a router keeps per token for each expert that the token goes to: indices, weights and places. In addition,
a routing map has one byte per token for every expert."""


class KeptBytes(NamedTuple):
    """Bytes of one micro-batch: those kept until the layer's backward, and those that its backward computes again."""

    activation_bytes: int
    recompute_bytes: int = 0


def kept_by_chunk(kinds: Sequence[str], shape, batch, parallel: Parallel) -> tuple[tuple[int, ...], int]:
    """Bytes that each layer of a chunk keeps on one tensor-parallel rank, and the most bytes that a backward computes
    again at one time.

    Args:
        kinds: ``embedding``, ``transformer``, ``moe`` or ``output`` of every layer.
        shape, batch: a GptShape and a MicroBatch (:mod:`megatron_ext.workload.gpt_shapes`).
    """
    layers = [number for number, kind in enumerate(kinds) if kind in ("transformer", "moe")]
    first = layers[0] if layers else 0
    kept = [
        _kept_by_layer(kind, shape, batch._replace(recompute=batch.recompute_of(number - first)), parallel)
        for number, kind in enumerate(kinds)
    ]
    activation_bytes = [each.activation_bytes for each in kept]
    anew = max((each.recompute_bytes for each in kept), default=0)
    if batch.recompute == "full" and layers:
        between = activation_bytes[first]  # the input, which is not computed again
        if batch.recompute_method == "uniform":  # of layers recomputed together, only the first one's input is kept
            together = min(batch.recompute_num_layers, len(layers))
            for number in layers:
                if (number - first) % together:
                    activation_bytes[number] = 0
            anew *= together
        anew -= between
        if not shape.positions:  # 32-bit rotary angles, which the first of these layers keeps for all of them
            activation_bytes[first] += 4 * batch.seq_length // batch.context_parallel * shape.head_dim
    return tuple(activation_bytes), anew


def _kept_by_layer(kind: str, shape, batch, parallel: Parallel) -> KeptBytes:
    item, tp, routing = ITEM_BYTES[shape.dtype], parallel.tensor_model_parallel_size, 0
    elements = batch.tokens * shape.hidden // (tp if batch.sequence_parallel else 1)
    between, masks = item * elements, elements if batch.hidden_dropout else 0
    moments = 0 if shape.rms_norm else 2 * between // shape.hidden  # mean and deviation of each token, kept by a norm
    if kind == "embedding":  # tokens; with tensor parallelism also a copy, and a mask of those that other ranks look up
        own = (9 if shape.positions else 1) * batch.tokens if tp > 1 else 0
        return KeptBytes(8 * batch.tokens + masks + own)
    if kind == "output":  # inputs of norm and matrix; the 32-bit softmax, labels and a mask of other ranks', or logits
        loss = item * shape.vocab // tp if batch.loss_fusion == "te" else 4 * shape.vocab // tp + 9
        return KeptBytes(2 * between + batch.tokens * loss + moments)
    width, groups = shape.heads * shape.head_dim, shape.query_groups * shape.head_dim
    # Number of tensors as wide as the MLP: the inputs of the second matrix and of the activation function. One that is
    # not fused also keeps both factors of its output.
    inner = 2 + shape.gated * (1 if batch.fused_swiglu else 3)
    behind = width + inner * shape.ffn
    if kind == "moe":  # also the inputs of the first matrix; the token's weight multiplies the activation's output
        number, topk, ffn, _, shared = shape.experts
        behind = width + topk * (parallel.etp * shape.hidden + 3 * ffn) + inner * shared
        routing = (ROUTED * topk + number) * elements // shape.hidden
    columns = behind + _inputs_of_attention(shape, batch, width, groups)
    # Attention that is not fused keeps scores, and keys and values repeated for the queries. A fused kernel keeps one
    # sum per row.
    score = (2 * item + 1 if batch.attention_dropout else item) if batch.score_heads else 0
    scores = score * batch.tokens * batch.seq_length * batch.score_heads
    copies = item * batch.tokens * 2 * width // tp if scores and groups < width else 0
    sums = 0 if scores else 4 * batch.tokens * shape.heads // tp
    # Sines and cosines, once for queries and once for keys.
    rotated = batch.local and not shape.positions
    waves = 4 * item * batch.seq_length // batch.context_parallel * shape.head_dim * rotated
    whole = 4 * between + 2 * (masks + moments) + item * batch.tokens * columns // tp + scores + copies + sums + waves
    whole += routing
    if batch.recompute == "full":
        return KeptBytes(between, whole)
    if batch.recompute != "selective":
        return KeptBytes(whole)
    # By then the backward has freed what the layer keeps after attention.
    freed = 2 * between + 2 * masks + moments + item * batch.tokens * behind // tp
    anew = scores + copies + sums
    return KeptBytes(whole - anew, max(anew - freed, 0))


def _inputs_of_attention(shape, batch, width: int, groups: int) -> int:
    """Columns that attention, and norms of queries and keys, keep: of the output of the QKV matrix and of its copies.

    Transformer Engine keeps copies and frees the output, except values that wait for recompute. Megatron's local layers
    keep the output as long as any part of it is in use. With grouped queries no part is in use unless there are norms
    or recompute, because queries are copied and keys and values are repeated.
    """
    output, made = width + 2 * groups, shape.qk_norm or not shape.positions
    grouped, selective = groups < width, batch.recompute == "selective"
    copies = (made or grouped) * width + made * groups
    if not batch.local:
        return output + copies * selective + (width + groups if shape.qk_norm else 0)
    if not grouped or selective:
        return output + copies + (width if grouped and shape.qk_norm else 0)
    return width + (width + output if shape.qk_norm else 0)
