"""Layers of the real model, for the measuring program: ``--modules`` of ``megatron-ext measure``.

``megatron-ext measure --modules megatron_ext.megatron.layer_runners:layer_runners -- OPTIONS``
with Megatron's options after ``--``. A step's batch is stacked from rows in memory, as if other processes read the
samples. A training script whose own thread reads them passes ``read_batches`` (see examples/example_layers.py).

[Note: A balanced router]
Every expert gets the same number of tokens: ``tokens topk / experts`` from every rank. The router computes as usual;
then the logits of the experts whose turn it is are raised. Within the layer, Megatron's dispatcher sends tokens to the
experts of other expert-parallel ranks and back; this is part of the layer's time.
"""

from functools import partial

import torch

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules

from megatron_ext.megatron import expert_options, gpt_model, ignored_options
from megatron_ext.megatron.boundaries import Layer, layers_of
from megatron_ext.megatron.gpt_arguments import UNEVEN
from megatron_ext.megatron.releases import accepted
from megatron_ext.runtime.device import has_cuda

COLD_BYTES = 1 << 30
"""Layers of at most this many bytes in all are made, which is more than any cache holds."""

ONE_LAYER = dict.fromkeys(UNEVEN) | {"num_layers": 1, "pipeline_model_parallel_size": 1}
ONE_LAYER |= {"num_virtual_stages_per_pipeline_rank": None}
"""Options of a model that is built to find out how large a layer is."""


class LayerRunner:
    """Runs layers of one kind on random input as a step does, including gradient accumulation.

    Args:
        run: ``run(index)``, one forward of a layer; returns its output.
        layers: the layers, which are used in turn.
        boundary: the layers' input, whose gradient they return; None for the embedding.
    """

    def __init__(self, run, layers: list[Layer], boundary):
        self._run, self._boundary = run, boundary
        self._parameters: list[list] = [[own for _, own in layer.parameters] for layer in layers]
        self.visits = len(layers)
        every = [parameter for owned in self._parameters for parameter in owned]
        self.dtype = str(every[0].dtype).removeprefix("torch.") if every else None
        for parameter in every:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        self._outputs, self._gradient = [], None
        self.not_saved: list[torch.Tensor] | None = None  # parameters and what all layers share

    def forward(self) -> None:
        self._outputs.append(self._run(len(self._outputs)))

    def backward(self) -> None:
        output = self._outputs.pop()
        if self._gradient is None:
            self._gradient = torch.ones_like(output)
        output.backward(self._gradient)
        for parameter in self._parameters[len(self._outputs)]:  # as DistributedDataParallel's hooks do
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None
        if self._boundary is not None:
            self._boundary.grad = None


class StepRunner:
    """Runs what a step of a chunk does in addition to its layers: the next batch, Megatron's forward and
    backward step, and a model whose decoder has no layer.

    Args:
        batches: an endless iterator of micro-batches, like that of the run.
    """

    def __init__(self, model, batches, mask: torch.Tensor, boundary: torch.Tensor):
        model.pre_process = model.post_process = model.decoder.pre_process = model.decoder.post_process = False
        model.decoder.layers, model.decoder.final_layernorm = torch.nn.ModuleList(), None
        model.decoder.num_layers_per_pipeline_rank = 0  # full recompute counts layers by it
        self.model, self._batches, self._mask, self._boundary = model, batches, mask, boundary
        self._output = None

    def _forward_step(self, iterator, model):
        batch = next(iterator)
        output = model(batch["tokens"], batch["position_ids"], self._mask, labels=batch["labels"])
        return output, lambda output: (output, {})

    def forward(self) -> None:
        arguments = accepted(
            schedules.forward_step,
            forward_step_func=self._forward_step,
            data_iterator=self._batches,
            model=self.model,
            num_microbatches=1,
            input_tensor=self._boundary,
            forward_data_store=[],
            config=self.model.config,
            cp_group_size=1,
            is_last_stage=False,
        )
        result = schedules.forward_step(**arguments)
        self._output = result[0] if isinstance(result, tuple) else result

    def backward(self) -> None:
        arguments = accepted(
            schedules.backward_step,
            input_tensor=self._boundary,
            output_tensor=self._output,
            output_tensor_grad=torch.ones_like(self._boundary),
            model_type=ModelType.encoder_or_decoder,
            config=self.model.config,
        )
        schedules.backward_step(**arguments)
        self._boundary.grad = self._output = None


def _recomputes(args) -> tuple[bool, bool]:
    """Whether the measured layers are recomputed in backward, and whether every layer of the run keeps the same as one
    of them. It does not if several layers are recomputed together, or if only some are recomputed.

    Args:
        args: the options of the run, with all of its layers and stages.
    """
    if args.recompute_granularity != "full":
        return False, True
    chunks = args.pipeline_model_parallel_size * (args.num_virtual_stages_per_pipeline_rank or 1)
    count = args.recompute_num_layers or 1
    if args.recompute_method == "uniform":
        return True, count == 1
    every = count * chunks >= args.num_layers
    return every, every


def layer_runners(options: list[str], read_batches=None) -> dict:
    """Runners by layer kind (``embedding``, ``transformer``, ``moe``, ``output``) for Megatron's options, and
    ``step`` for what a step does in addition to its layers.

    Args:
        options: Megatron's options of the run.
        read_batches: ``read_batches(args)`` returns an endless iterator of micro-batches as the training thread reads
            them: dicts with ``tokens``, ``labels`` and ``position_ids`` of shape (micro-batch, sequence).

    Raises:
        InputError: an option is wrong.
    """
    args = ignored_options.parse(options, verb="measure", data_parallel_size=torch.distributed.get_world_size())
    recomputed, alike = _recomputes(args)
    empty, model = _models(args)
    device = next(model.parameters()).device
    batch, seq = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, args.vocab_size, (batch, seq), device=device)
    positions = torch.arange(seq, device=device).repeat(batch, 1)
    mask = torch.tril(torch.ones((1, 1, seq, seq), device=device)) < 0.5
    part = seq // args.tensor_model_parallel_size if args.sequence_parallel else seq
    hidden = torch.randn(
        part, batch, args.hidden_size, device=device, dtype=model.config.params_dtype, requires_grad=True
    )
    rotary = model.rotary_pos_emb(seq) if args.position_embedding_type == "rope" else None

    def embedding(index):
        return model.embedding(input_ids=tokens, position_ids=positions)

    def decoder(layers, index):
        def run(hidden):
            return layers[index].module(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary)[0]

        return tensor_parallel.checkpoint(run, False, hidden) if recomputed else run(hidden)

    def output(index):
        assert model.decoder.final_layernorm is not None  # only the embedding's model has none
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits, _ = model.output_layer(model.decoder.final_layernorm(hidden), weight=weight)
        return model.compute_language_model_loss(tokens, logits).float().mean()

    ends, runners = {"embedding": (embedding, None), "output": (output, hidden)}, {}
    for kind, like in _by_kind(model).items():
        run, boundary = ends.get(kind) or (partial(decoder, like), hidden)
        runners[kind] = LayerRunner(run, like, boundary)
    micro_batches = read_batches(args) if read_batches is not None else _stacked_batches(tokens, positions)
    for kind, runner in runners.items():
        if kind in ends or alike:
            runner.not_saved = [*model.parameters(), mask, *([] if rotary is None else [rotary])]
    return runners | {"step": StepRunner(empty, micro_batches, mask, hidden.detach().clone().requires_grad_())}


def _models(args) -> tuple[GPTModel, GPTModel]:
    """A model of one layer, and one with so many layers of each kind that no cache holds them. ``args`` are changed to
    those of the latter."""
    layers, kinds = max(args.num_layers // args.pipeline_model_parallel_size, 1), expert_options.pattern(args)
    vars(args).update(ONE_LAYER | {"moe_layer_freq": [max(kinds)]})
    if not parallel_state.is_initialized():
        gpt_model.initialize_parallel(args)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    # Only the pipeline frees outputs: with the option, Megatron's backward step would treat them as freed.
    (empty,) = gpt_model.build_chunks(args, gpt_model.transformer_config(args, deallocate_pipeline_outputs=False))
    layer_bytes = sum(p.numel() * 4 for p in empty.decoder.layers.parameters())
    args.moe_layer_freq = expert_options.fewer_layers(kinds, max(1, min(layers, COLD_BYTES // max(layer_bytes, 1))))
    args.num_layers = len(args.moe_layer_freq)
    config = gpt_model.transformer_config(args)
    (model,) = gpt_model.build_chunks(args, config)
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
    empty, model = (each.to(device=device, dtype=config.params_dtype) for each in (empty, model))
    _balance(model, args.moe_router_topk)
    return empty, model


def _by_kind(model) -> dict[str, list[Layer]]:
    found: dict[str, list[Layer]] = {}
    for layer in layers_of(model):
        found.setdefault(layer.kind, []).append(layer)
    return found


def _balance(model, topk: int) -> None:
    """Let routers send every expert the same number of tokens, see [Note: A balanced router]."""
    for module in model.modules():
        if hasattr(module, "gating"):
            module.gating = partial(_gate_evenly, module.gating, topk)


def _gate_evenly(gating, topk: int, *args, **kwargs):
    """Logits of shape (..., experts) that are by far the largest for the next ``topk`` experts of every token."""
    logits = gating(*args, **kwargs)
    experts = logits.shape[-1]
    turns = torch.arange(logits.numel() // experts * topk, device=logits.device) % experts
    raised = torch.zeros_like(logits).view(-1, experts).scatter_(1, turns.view(-1, topk), 100.0)
    return logits + raised.view_as(logits)


def _stacked_batches(tokens, positions):
    """An endless iterator of micro-batches that are stacked from rows in memory."""
    mask = torch.ones_like(tokens, dtype=torch.float32)
    batch = {"tokens": tokens, "labels": tokens, "loss_mask": mask, "position_ids": positions}
    rows = [{key: value[index] for key, value in batch.items()} for index in range(len(tokens))]
    while True:
        yield {key: torch.stack([row[key] for row in rows]) for key in batch}
