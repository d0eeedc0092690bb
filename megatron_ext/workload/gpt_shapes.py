"""The workload of a GPT from its sizes alone. Arithmetic gives what `describe` otherwise reads from the modules.

Names, shapes and order of parameters are those of ``megatron.core.models.gpt.GPTModel`` with local layers, as one
tensor-parallel rank holds them. tests/distributed/megatron/test_describe.py compares the two.
"""

from collections import Counter
from itertools import islice
from math import prod
from typing import Literal, NamedTuple

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.activation_bytes import kept_by_chunk
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import EXPERTS, SCHEMA_VERSION, Chunk, Experts, Limits, Parameter, Workload, check


class MicroBatch(NamedTuple):
    """What one step computes on, in Megatron's words. Cost tables hold the values in this order: new fields go last.

    Attributes:
        sequence_parallel: each tensor-parallel rank holds its part of the sequence between the matrices.
        recompute: ``full`` runs a layer's forward again in the backward, ``selective`` only that of
            ``recompute_modules``.
        recompute_method: for ``full``: ``block`` recomputes the first ``recompute_num_layers`` layers of a chunk,
            ``uniform`` recomputes all layers, ``recompute_num_layers`` at a time.
        score_heads: attention heads of one rank whose scores are written to memory; 0 with fused (flash) attention.
        hidden_dropout, attention_dropout: whether activations, or scores of attention that is not fused, are dropped at
            random. The mask is kept, one byte per element.
        loss_fusion: ``native`` or ``te``, with ``--cross-entropy-loss-fusion``.
        recompute_modules: the modules that ``selective`` recomputes.
        context_parallel: ranks that a sequence is divided among; each attends to all of it.
        local: layers are Megatron's local ones, not Transformer Engine's.
        fused_swiglu: False with ``--no-bias-swiglu-fusion``.
    """

    seq_length: int
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    recompute: str | None = None
    score_heads: int = 0
    recompute_method: str = "uniform"
    recompute_num_layers: int = 1
    hidden_dropout: bool = False
    context_parallel: int = 1
    loss_fusion: str | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    attention_dropout: bool = False
    local: bool = False
    fused_swiglu: bool = True

    def recompute_of(self, number: int) -> str | None:
        """The recompute granularity of transformer layer ``number`` of a chunk; None: nothing runs again."""
        spared = self.recompute_method == "block" and number >= self.recompute_num_layers
        return None if self.recompute == "full" and spared else self.recompute

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.seq_length * self.micro_batch_size // self.context_parallel


class ExpertShape(NamedTuple):
    """Experts of a GPT: ``number`` over all ranks, each with ``ffn`` columns, in every layer whose entry in ``layers``
    is 1. Each token goes to ``topk`` of them. All tokens go through a shared expert of ``shared`` columns."""

    number: int
    topk: int
    ffn: int
    layers: tuple[int, ...]
    shared: int = 0


class GptShape(NamedTuple):
    """Sizes of a GPT. ``vocab`` is padded. ``positions`` is 0 without learned position embeddings. ``stage_layers`` is
    the number of layers of each stage; it is used when it has as many entries as there are stages, otherwise all stages
    have equally many layers. ``qk_norm``: queries and keys are normed, one head at a time."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    vocab: int
    head_dim: int
    positions: int = 0
    gated: bool = False
    rms_norm: bool = False
    linear_bias: bool = True
    qkv_bias: bool = True
    tied: bool = True
    dtype: str = "bfloat16"
    stage_layers: tuple[int, ...] = ()
    qk_norm: bool = False
    experts: ExpertShape | None = None

    def layer(self, tp: int, kind: str = "transformer", ep: int = 1, etp: int = 1) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's parameters by name, in the order in which modules register them. In a layer of kind
        ``moe``, experts are spread over ``ep`` ranks and each is cut into ``etp`` parts."""
        width = self.heads * self.head_dim
        qkv = (width + 2 * self.query_groups * self.head_dim) // tp
        router, columns = {}, {"mlp": self.ffn // tp}
        if kind == "moe":
            assert self.experts is not None
            number, _, ffn, _, shared = self.experts
            router = {"mlp.router.weight": (number, self.hidden), "mlp.router.bias": (number,)}
            columns = {f"mlp{EXPERTS}local_experts.{index}": ffn // etp for index in range(number // ep)}
            columns |= {"mlp.shared_experts": shared // tp} if shared else {}
        found = {
            **self.norm("input_layernorm"),
            "self_attention.linear_proj.weight": (self.hidden, width // tp),
            "self_attention.linear_proj.bias": (self.hidden,),
            "self_attention.linear_qkv.weight": (qkv, self.hidden),
            "self_attention.linear_qkv.bias": (qkv,),
            **(self.norm("self_attention.q_layernorm", self.head_dim) if self.qk_norm else {}),
            **(self.norm("self_attention.k_layernorm", self.head_dim) if self.qk_norm else {}),
            **self.norm("pre_mlp_layernorm"),
            **router,
        }
        for name, size in columns.items():
            rows = (2 if self.gated else 1) * size
            found |= {f"{name}.linear_fc1.weight": (rows, self.hidden), f"{name}.linear_fc1.bias": (rows,)}
            found |= {f"{name}.linear_fc2.weight": (self.hidden, size), f"{name}.linear_fc2.bias": (self.hidden,)}
        biased = {"self_attention.linear_qkv.bias": self.qkv_bias}
        return {
            name: shape
            for name, shape in found.items()
            if "norm" in name or not name.endswith("bias") or biased.get(name, self.linear_bias)
        }

    def norm(self, name: str, columns: int = 0) -> dict[str, tuple[int, ...]]:
        return {f"{name}.{part}": (columns or self.hidden,) for part in ("weight", "bias")[: 1 if self.rms_norm else 2]}

    @property
    def numel(self) -> int:
        """Elements of the whole model's parameters; a tied matrix counts once."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        layers = sum(
            number * sum(map(prod, self.layer(1, kind).values())) for kind, number in Counter(self.kinds).items()
        )
        return layers + ends + sum(map(prod, self.norm("").values()))

    @property
    def kinds(self) -> list[str]:
        """Kinds of all transformer layers: ``moe`` for layers with experts, else ``transformer``."""
        there = [0] * self.layers if self.experts is None else self.experts.layers
        return [("transformer", "moe")[each] for each in there]

    def stages(self, parallel: Parallel) -> list[list[str]]:
        """Kinds of the transformer layers of every stage.

        Raises:
            InputError: the layers do not divide into the stages.
        """
        stages, counts = parallel.pp * parallel.vp, self.stage_layers
        if len(counts) != stages:
            if self.layers % stages:
                raise InputError(f"does not divide into {stages} stages", field="--num-layers", value=self.layers)
            counts = (self.layers // stages,) * stages
        assert sum(counts) == self.layers, counts
        kinds = iter(self.kinds)
        return [[*islice(kinds, count)] for count in counts]


def gpt_workload(
    shape: GptShape,
    parallel: Parallel,
    batch: MicroBatch,
    *,
    zero_stage: Literal[1, 2, 3] = 1,
    limits: Limits | None = None,
    optimizer: OptimizerSettings | None = None,
) -> Workload:
    """The workload of a GPT.

    Raises:
        InputError: the layers do not divide into the stages.
    """
    stages, experts = shape.stages(parallel), shape.experts
    made = Workload(
        schema_version=SCHEMA_VERSION,
        kind="workload",
        parallel=parallel,
        zero_stage=zero_stage,
        chunks=tuple(_chunk(shape, parallel, batch, stage, kinds) for stage, kinds in enumerate(stages)),
        p2p_bytes=p2p_bytes(parallel, batch, shape.hidden, ITEM_BYTES[shape.dtype]),
        limits=limits or Limits(),
        optimizer=optimizer or OptimizerSettings(),
        experts=experts and Experts(num_experts=experts.number, router_topk=experts.topk),
    )
    return check(made)


def p2p_bytes(parallel: Parallel, batch: MicroBatch, hidden_size: int, itemsize: int) -> int:
    """Bytes of one activation message between two pipeline stages. With one stage nothing is sent. The figure still
    says for which batch compute was measured, which parameters do not say."""
    # With sequence parallelism each tensor-parallel rank holds, and sends, its part of the sequence.
    parts = parallel.tensor_model_parallel_size if batch.sequence_parallel else 1
    return batch.tokens * hidden_size * itemsize // parts


def _chunk(shape: GptShape, parallel: Parallel, batch: MicroBatch, stage: int, layers: list[str]) -> Chunk:
    tp, last = parallel.tensor_model_parallel_size, parallel.pp * parallel.vp - 1
    before, after = ["embedding"] if stage == 0 else [], ["output"] if stage == last else []
    kinds = [*before, *layers, *after]
    # The first and the last pipeline rank both hold a tied matrix, in a bucket of its own. Within one chunk the output
    # layer borrows it.
    shared = shape.tied and parallel.pp > 1
    borrowed = shape.tied and stage == 0 and stage == last
    matrix, parameters = (shape.vocab // tp, shape.hidden), []

    def add(name: str, size: tuple[int, ...], layer: int, **more) -> None:
        size_bytes = prod(size) * ITEM_BYTES[shape.dtype]
        parameters.append(Parameter(name=name, shape=size, dtype=shape.dtype, bytes=size_bytes, layer=layer, **more))

    if stage == 0:
        uses = (len(kinds) - 1,) if borrowed else ()
        add("embedding.word_embeddings.weight", matrix, 0, shared_embedding=shared, borrowed_by=uses)
        if shape.positions:
            add("embedding.position_embeddings.weight", (shape.positions, shape.hidden), 0)
    for number, kind in enumerate(layers):
        for name, size in shape.layer(tp, kind, parallel.ep, parallel.etp).items():
            expert = parallel.ep > 1 and EXPERTS in name  # with ep = 1 Megatron shards them like other parameters
            add(f"decoder.layers.{number}.{name}", size, len(before) + number, expert=expert)
    if stage == last:
        for name, size in shape.norm("decoder.final_layernorm").items():
            add(name, size, len(kinds) - 1)
        if not borrowed:
            add("output_layer.weight", matrix, len(kinds) - 1, shared_embedding=shared)
    activation_bytes, recompute_bytes = kept_by_chunk(kinds, shape, batch, parallel)
    return Chunk(
        pp_rank=stage % parallel.pp,
        model_chunk_id=stage // parallel.pp,
        parameters=tuple(parameters),
        layer_kinds=tuple(kinds),
        activation_bytes=activation_bytes,
        recompute_bytes=recompute_bytes,
    )
