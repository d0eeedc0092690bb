"""Layers of the real model, for the measuring program: ``--modules`` of ``megatron-ext measure``.

``megatron-ext measure --modules megatron_ext.megatron.layer_runners:layer_runners -- OPTIONS``
with Megatron's options behind ``--``.
"""

import torch

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

from megatron.core import parallel_state, tensor_parallel

from megatron_ext.megatron import describe, gpt
from megatron_ext.megatron.layers import layers_of


class LayerRunner:
    """One layer with random input: what a step does with it, gradient accumulation included.

    Args:
        run: one forward; returns the layer's output.
        parameters: what the layer owns.
        boundary: the layer's input, whose gradient it hands back; None for the embedding.
    """

    def __init__(self, run, parameters, boundary):
        self._run, self._boundary = run, boundary
        self._parameters = parameters
        for parameter in parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        self._output = self._gradient = None

    def forward(self) -> None:
        self._output = self._run()

    def backward(self) -> None:
        if self._gradient is None:
            self._gradient = torch.ones_like(self._output)
        self._output.backward(self._gradient)
        for parameter in self._parameters:  # as DistributedDataParallel's hooks do
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None
        if self._boundary is not None:
            self._boundary.grad = None
        self._output = None


def layer_runners(options: list[str]) -> dict[str, LayerRunner]:
    """Runners by layer kind (``embedding``, ``transformer``, ``output``) for Megatron's options.

    Raises:
        InputError: an option is wrong.
    """
    args = describe.parse(options)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_model_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    args.num_layers, args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank = 1, 1, None
    config = gpt.transformer_config(args)
    (model,) = gpt.build_chunks(args, config)
    device = torch.device("cuda", torch.cuda.current_device()) if cpu_compat.has_cuda() else torch.device("cpu")
    model = model.to(device=device, dtype=config.params_dtype)
    model.train()
    batch, seq = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, args.vocab_size, (batch, seq), device=device)
    positions = torch.arange(seq, device=device).repeat(batch, 1)
    mask = torch.tril(torch.ones((1, 1, seq, seq), device=device)) < 0.5
    hidden = torch.randn(seq, batch, args.hidden_size, device=device, dtype=config.params_dtype, requires_grad=True)
    rotary = model.rotary_pos_emb(seq) if args.position_embedding_type == "rope" else None

    def embedding():
        return model.embedding(input_ids=tokens, position_ids=positions)

    def transformer():
        return model.decoder.layers[0](hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary)[0]

    def output():
        logits, _ = model.output_layer(model.decoder.final_layernorm(hidden), weight=_output_weight(model))
        return model.compute_language_model_loss(tokens, logits).float().mean()

    runs = {"embedding": (embedding, None), "transformer": (transformer, hidden), "output": (output, hidden)}
    owned = {layer.kind: [parameter for _, parameter in layer.parameters] for layer in layers_of(model)}
    return {kind: LayerRunner(run, owned[kind], boundary) for kind, (run, boundary) in runs.items()}


def _output_weight(model):
    return model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
