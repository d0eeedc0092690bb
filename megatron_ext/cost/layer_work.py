"""The work of a layer: floating-point operations and bytes, counted from its parameters and the micro-batch.

[Note: What is counted]
* A matrix of ``n`` parameters takes ``2 n`` operations per token in the forward and twice as many in the backward.
* Attention scores take ``4 seq width`` operations per token. A fused kernel omits the half that the causal mask hides.
  It computes the scores again in the backward: five products where the forward has two.
* Everything between the matrices (norms, activation functions, residuals) only moves bytes. One pass reads or writes an
  activation once. The backward moves twice as much as the forward.
* Scores that are not fused are written to memory and read again, :data:`SCORE_PASSES` times in total.
* Each expert of a rank computes on the tokens that a balanced router sends to it: ``tokens topk / experts`` of every
  rank. These tokens travel to the ranks of their experts and back, in the forward and in the backward. They travel by
  all-to-all between expert-parallel ranks, and are then gathered and summed among expert-tensor-parallel ranks,
  whatever ``--moe-token-dispatcher-type`` does. Not counted: choosing and sorting tokens, an uneven router, dropped
  tokens, and the overlap of a shared expert with this.
* With context parallelism, a rank's queries need the keys and values of whole sequences. These go around the ring of
  context-parallel ranks while scores are computed. The backward sends them once more, with their gradients.
* Tensor parallelism adds all-reduces of an activation to a layer's forward and to its backward: one each for attention
  and for an MLP or a shared expert. Other experts get a rank's part of the sequence and add none.
Recomputing adds forward work to the backward.
"""

from math import prod
from typing import NamedTuple

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.gpt_shapes import MicroBatch
from megatron_ext.workload.workload import EXPERTS, Chunk, Parameter, Workload

SCORE_PASSES = 7
"""The scores are written, read and written by the softmax and by dropout with its mask, and read by the second
product."""
FUSED_BACKWARD = 2.5
"""Operations of the backward of fused attention, relative to its forward. Source: FlashAttention-2 (arXiv 2307.08691),
section 4.1."""
LOSS_BYTES = {None: 18, "native": 10, "te": 4}
"""Bytes that the forward moves per logit, by ``--cross-entropy-fusion-impl``; the backward moves twice as many.
Megatron's loss reads 16 bits and makes passes over 32 bits in nine kernels, 52 bytes in total; compiled it takes about
30. Transformer Engine's kernels stay in 16 bits: two passes that read, and gradients that replace logits and are
scaled, 10 in total."""


class Work(NamedTuple):
    """Work of one layer.

    Attributes:
        products: (operations, bytes) of each matrix product.
        score_flop, score_bytes: of core attention. Its backward has ``score_backward`` times as many operations.
        moved_bytes: moved between the products.
        reduced_bytes: of each tensor-parallel all-reduce.
        routed: bytes of tokens on a rank of their experts, one entry for each time that they travel.
        exchanged_bytes: keys and values of whole sequences, from all context-parallel ranks.
    """

    products: tuple[tuple[float, float], ...] = ()
    score_flop: float = 0.0
    score_bytes: float = 0.0
    moved_bytes: float = 0.0
    reduced_bytes: tuple[float, ...] = ()
    routed: tuple[float, ...] = ()
    score_backward: float = 2.0
    exchanged_bytes: float = 0.0

    def plus(self, other: "Work") -> "Work":
        sums = {name: getattr(self, name) + getattr(other, name) for name in self._fields}
        return self._replace(**sums | {"score_backward": max(self.score_backward, other.score_backward)})

    def backward(self, again: "Work") -> "Work":
        """The work of the backward that follows this forward. ``again``: the part of the forward that it recomputes."""
        return self._replace(
            products=tuple((2 * flop, 2 * size) for flop, size in self.products),
            score_flop=self.score_backward * self.score_flop,
            score_bytes=2 * self.score_bytes,
            moved_bytes=2 * self.moved_bytes,
            exchanged_bytes=2 * self.exchanged_bytes,
        ).plus(again)


MODULES = {
    "layernorm": ("layernorm.",),
    "mlp": ("mlp.linear_fc",),
    "moe": (".mlp.",),
    "shared_experts": ("shared_experts.",),
    "mla_up_proj": ("_up_proj.",),
}
"""By name of a ``--recompute-modules`` module: parts of the names of the parameters that it computes with.
``core_attn`` has no parameters, and the work of ``moe_act`` is not counted."""


def recomputed_work(
    forward: Work, kind: str | None, used: list[Parameter], batch: MicroBatch, tp: int, share: "ExpertsShare | None"
) -> Work:
    """The work that the backward recomputes in a layer whose forward is ``forward``."""
    if batch.recompute != "selective":
        return forward if batch.recompute == "full" else Work()
    again = Work()
    for module in batch.recompute_modules:
        if module == "core_attn":
            names = ("score_flop", "score_bytes", "exchanged_bytes")
            again = again.plus(Work(**{name: getattr(forward, name) for name in names}))
            continue
        own = [p for p in used if any(part in p.name for part in MODULES.get(module, ()))]
        part = forward_work(kind, own, batch, tp, share)
        reduced = part.reduced_bytes[:1] if module == "mlp" or _has_shared_expert(own) else ()
        again = again.plus(part._replace(reduced_bytes=reduced))
    return again


def layer_parameters(chunk: Chunk) -> list[tuple[str | None, list[Parameter]]]:
    """Kind and parameters of every layer of a chunk. A matrix that a layer borrows is one of its parameters."""
    found: list[list[Parameter]] = [[] for _ in range(chunk.num_layers)]
    for parameter in chunk.parameters:
        for layer in parameter.uses:
            found[layer].append(parameter)
    return list(zip(chunk.layer_kinds or (None,) * len(found), found))


class ExpertsShare(NamedTuple):
    """``copies``: copies of tokens that one rank's experts compute on, per token of its micro-batch. They are divided
    among ``number`` experts."""

    copies: float
    number: int


def experts_share(workload: Workload) -> ExpertsShare | None:
    """The share of the experts of one rank with a balanced router; None if the workload does not describe experts."""
    parallel, experts = workload.parallel, workload.experts
    if experts is None:
        return None
    copies = experts.router_topk * parallel.etp / parallel.tensor_model_parallel_size
    return ExpertsShare(copies, max(experts.num_experts // parallel.ep, 1))


def forward_work(
    kind: str | None, used: list[Parameter], batch: MicroBatch, tp: int, share: ExpertsShare | None = None
) -> Work:
    """Work of the forward of one layer for one micro-batch, on one tensor-parallel rank.

    Args:
        kind, used: from :func:`layer_parameters`, one rank's part.
        tp: tensor-parallel size.
        share: the tokens that its experts compute on.

    Raises:
        InputError: the layer has experts, and the workload does not say how many tokens they compute on.
    """
    total, normed = Work(), any("q_layernorm" in p.name for p in used)
    for parameter in used:
        if EXPERTS not in parameter.name:
            total = total.plus(_work_of(parameter, kind, batch, tp, normed))
    hidden = max((p.shape[-1] for p in used if len(p.shape) == 1 and "norm" in p.name), default=0)
    if routed := [p for p in used if EXPERTS in p.name]:
        total = total.plus(_work_of_experts(routed, hidden or min(routed[0].shape), batch, share))
    if kind == "output" and (rows := [p.shape[0] for p in used if len(p.shape) == 2]):
        total = total._replace(moved_bytes=total.moved_bytes + LOSS_BYTES[batch.loss_fusion] * batch.tokens * max(rows))
    if batch.context_parallel > 1 and used:  # rows of queries, keys and values, minus the queries' rows
        width = sum(p.shape[0] for p in used if p.name.endswith("linear_qkv.weight"))
        width -= sum(p.shape[1] for p in used if p.name.endswith("linear_proj.weight"))
        size = batch.tokens * batch.context_parallel * max(width, 0) * ITEM_BYTES[used[0].dtype]
        total = total._replace(exchanged_bytes=float(size))
    if tp > 1 and used:
        message = float(batch.tokens * (hidden or used[0].shape[-1]) * ITEM_BYTES[used[0].dtype])
        twice = kind in (None, "transformer") or (kind == "moe" and _has_shared_expert(used))
        total = total._replace(reduced_bytes=(message,) * (2 if twice else 1))
    return total


def _has_shared_expert(used: list[Parameter]) -> bool:
    return any("shared_experts." in parameter.name for parameter in used)


def _work_of_experts(used: list[Parameter], hidden: int, batch: MicroBatch, share: ExpertsShare | None) -> Work:
    if share is None:
        raise InputError("is missing, but layers have experts: describe the model again", field="experts")
    item, tokens = ITEM_BYTES[used[0].dtype], batch.tokens * share.copies
    numel = sum(p.numel for p in used if len(p.shape) > 1) / share.number  # of one expert
    columns = numel / hidden  # between its two matrices, before and after the activation function
    read = item * (numel * share.number + tokens * (2 * hidden + columns))  # every expert's matrices
    sorted_bytes = 4 * item * tokens * hidden  # sorted by expert, and back: read and written
    return Work(
        products=((2.0 * tokens * numel, read),),
        moved_bytes=item * tokens * columns + sorted_bytes,
        routed=(item * tokens * hidden,) * 2,
    )


def _work_of(parameter: Parameter, kind: str | None, batch: MicroBatch, tp: int, normed: bool) -> Work:
    item, tokens, name = ITEM_BYTES[parameter.dtype], batch.tokens, parameter.name
    between = item * tokens / (tp if batch.sequence_parallel else 1)  # bytes of one column between matrices
    if len(parameter.shape) != 2:
        is_norm = "norm" in name and name.endswith("weight")
        return Work(moved_bytes=2.0 * between * parameter.shape[-1] if is_norm else 0.0)
    rows, columns = parameter.shape
    if "embedding" in name and kind != "output":  # a look-up
        return Work(moved_bytes=2.0 * between * columns)
    work = Work(products=((2.0 * tokens * prod(parameter.shape), item * (rows * columns + tokens * (rows + columns))),))
    if name.endswith("linear_qkv.weight"):  # split and rotated; queries and keys may be normalized
        return work._replace(moved_bytes=(4.0 if normed else 2.0) * item * tokens * rows)
    if name.endswith("linear_fc1.weight"):
        return work._replace(moved_bytes=1.0 * item * tokens * rows)
    if name.endswith("linear_fc2.weight"):  # written by the activation function; then bias, dropout, residual
        return work._replace(moved_bytes=1.0 * item * tokens * columns + 3 * between * rows)
    if name.endswith("linear_proj.weight"):
        square = 4.0 * tokens * batch.seq_length * columns
        scores = float(item * tokens * batch.seq_length * batch.score_heads * SCORE_PASSES)
        return work._replace(
            score_flop=square if batch.score_heads else square / 2,
            score_bytes=scores or 4.0 * item * tokens * columns,
            moved_bytes=3 * between * rows,
            score_backward=2.0 if batch.score_heads else FUSED_BACKWARD,
        )
    return work
