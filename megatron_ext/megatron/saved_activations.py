"""Activations of a GPT chunk: bytes that autograd saves in each layer, counted without computing anything.

The chunk is on the ``meta`` device. One micro-batch runs through it forward and backward; tensors have their real
shapes and dtypes but no data.
"""

import contextlib
import importlib
import sys
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import attention, mlp
from torch.nn import functional as F

from megatron_ext.formats.errors import one_line
from megatron_ext.megatron.boundaries import bare, layers_of
from megatron_ext.megatron.engine_modules import DotProductAttention, Linear, SavesInputs
from megatron_ext.megatron.gpt_arguments import context_ranks
from megatron_ext.runtime.saved_tensors import SavedTensors
from megatron_ext.workload.workload import Chunk


class Saved(NamedTuple):
    """Bytes of one micro-batch: those that each layer saves until its backward, and the most that its backward makes
    again at a time."""

    activation_bytes: tuple[int, ...]
    recompute_bytes: int


def with_saved_bytes(chunk: Chunk, module: torch.nn.Module, args, known: dict) -> Chunk:
    """A described chunk with the bytes that its layers save; unchanged if ``module`` cannot run without data.

    Args:
        module: the chunk on the ``meta`` device; it cannot be used afterwards.
        args: options with ``seq_length``, ``micro_batch_size`` and ``hidden_size``.
        known: what was counted for other chunks of the same model; this chunk is added.
    """
    # Chunks with the same layers save the same, and most chunks of a model have the same layers.
    key = chunk.layer_kinds, tuple((p.name.rpartition(".")[2], p.shape, p.dtype, p.layer) for p in chunk.parameters)
    if key not in known:
        known[key] = saved_activations(
            module,
            seq_length=args.seq_length // context_ranks(args),  # of one rank
            micro_batch_size=args.micro_batch_size,
            hidden_size=args.hidden_size,
            on_gpu=getattr(args, "distributed_backend", None) in (None, "nccl"),
            fused_swiglu=getattr(args, "bias_swiglu_fusion", "no_bias_swiglu_fusion" not in vars(args)),
        )
    return chunk if known[key] is None else msgspec.structs.replace(chunk, **known[key]._asdict())


def saved_activations(
    chunk: torch.nn.Module, *, seq_length: int, micro_batch_size: int, hidden_size: int, on_gpu=True, fused_swiglu=True
) -> Saved | None:
    """Count the bytes that a chunk on the ``meta`` device would save in training; None if it cannot run on that device,
    with the reason on stderr. The chunk cannot be used afterwards."""
    layers, config = layers_of(chunk), bare(chunk).config
    uneven = getattr(config, "num_moe_experts", None) and not getattr(config, "moe_pad_expert_input_to_capacity", False)
    if not layers or uneven:  # how many tokens an expert gets depends on the data
        return None
    try:
        fake_tensor = importlib.import_module("torch._subclasses.fake_tensor")
        with (
            fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
            _decisions_are_true(fake_tensor.DataDependentOutputException),
            torch.enable_grad(),
            _recomputes(),
            _fused_kernels(chunk, on_gpu, fused_swiglu),
            _selects_evenly(config),
        ):
            chunk.to_empty(device="cpu")
            _move_other_tensors(chunk)
            return _counted(bare(chunk), layers_of(chunk), seq_length, micro_batch_size, hidden_size)
    except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, ImportError) as error:
        # A kernel that cannot run without data (a fused one, Transformer Engine's) raises any of these. The activations
        # are then not counted, and the bill says so. The reason is printed, so that other errors are noticed.
        why = f"{type(error).__name__}: {one_line(str(error), 300)}"
        print(f"megatron-ext: what layers save could not be counted: {why}", file=sys.stderr, flush=True)
        return None


PREDICTION = "multi_token_prediction"
"""The module of Megatron's layers that predict further tokens."""


def _decisions_are_true(unknown: type[Exception]):
    """Layers of multi-token prediction ask whether there are tokens to predict; in this context the answer is yes.
    Questions of other layers about missing values still raise."""
    decide = torch.Tensor.__bool__

    def decide_without_data(condition):
        try:
            return decide(condition)
        except unknown:
            if PREDICTION not in sys._getframe(1).f_globals["__name__"]:
                raise
            return True

    return mock.patch.object(torch.Tensor, "__bool__", decide_without_data)


BALANCED = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
}


def balance_experts(config) -> None:
    """Let every expert of a model that is built on ``meta`` get the same number of tokens, so that sizes are known
    without data. Experts that are padded keep their capacity, which decides their sizes. The parameters stay as they
    are."""
    if getattr(config, "num_moe_experts", None):
        padded = getattr(config, "moe_pad_expert_input_to_capacity", False)
        for name in BALANCED.keys() - ({"moe_expert_capacity_factor"} if padded else set()):
            if hasattr(config, name):
                setattr(config, name, BALANCED[name])


class _Counts(list):
    """The numbers of tokens of the local experts, in place of the tensor from which Megatron reads them."""

    def tolist(self) -> list[int]:
        return list(self)


def _split_evenly(module, args):
    tokens, _, *others = args
    number = module.num_local_experts
    return (tokens, _Counts([tokens.shape[0] // number] * number), *others)


def _selects_evenly(config):
    """In this context a selection of tokens by experts (values and mask have shape ``[experts, tokens]``) has as many
    tokens for each expert, and not those of the mask, which has no data. Megatron 0.12.1 to 0.12.3 select so."""

    def masked_select(values, mask):
        experts, tokens = values.shape
        each = -(-tokens * config.moe_router_topk // experts)
        return SavesInputs.apply(lambda values: values[:, :each].flatten(), values)

    return mock.patch.object(torch.Tensor, "masked_select", masked_select)


def _move_other_tensors(chunk: torch.nn.Module) -> None:
    """Let tensors that are not buffers, such as frequencies of rotary embeddings, leave the ``meta`` device too."""
    for module in chunk.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                setattr(module, name, torch.empty_like(value, device="cpu"))


def _counted(model, layers, seq_length: int, micro_batch_size: int, hidden_size: int) -> Saved:
    tokens = torch.zeros((micro_batch_size, seq_length), dtype=torch.int64)
    mask = torch.zeros((1, 1, seq_length, seq_length), dtype=torch.bool)
    counted = _OneMicroBatch(len(layers), [*model.parameters(), mask])
    model.train()
    for index, layer in enumerate(layers):
        layer.module.register_forward_pre_hook(counted.layer_begins(index), with_kwargs=True)
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.register_forward_pre_hook(_split_evenly)
    with counted.saved:
        if not model.pre_process:
            parts = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
            shape = (seq_length // parts, micro_batch_size, hidden_size)
            model.set_input_tensor(torch.zeros(shape, dtype=model.config.params_dtype, requires_grad=True))
        return counted.result(model(tokens, tokens, mask, labels=tokens))


@contextlib.contextmanager
def _fused_kernels(chunk: torch.nn.Module, on_gpu: bool, fused_swiglu: bool):
    """In this context layers save what they save on a GPU. Megatron computes SwiGLU with a kernel unless it is told not
    to, and PyTorch computes RMSNorm with one: both save only their input. For dropout, a GPU saves one byte per
    element; a CPU saves the tensor that it multiplies by. With Transformer Engine's layers, rotary embeddings are a
    kernel too, which saves nothing large; for dropout in attention its kernels save the state of a random generator.
    Only its unfused attention saves scores."""
    config: Any = bare(chunk).config
    gated = fused_swiglu and config.gated_linear_unit and config.activation_func is F.silu

    def swiglu(x, *bias):
        gate, other = torch.chunk(x + bias[0] if bias else x, 2, -1)
        return F.silu(gate) * other

    kernel = lambda x, bias, *how: SavesInputs.apply(swiglu, x, *([] if bias is None else [bias]))
    rms_norm = lambda x, shape, w, eps: SavesInputs.apply(lambda x, w: torch.rms_norm(x, shape, w, eps), x, w)
    with contextlib.ExitStack() as stack:
        put = lambda *what: stack.enter_context(mock.patch.object(*what))
        engine = any(isinstance(module, Linear) for module in chunk.modules())
        if engine or on_gpu:
            put(F, "dropout", _dropout)
            put(F, "rms_norm", rms_norm)
            put(mlp, "bias_swiglu_impl", kernel)
            copies = (getattr(module, "config", None) or config for module in chunk.modules())  # experts have their own
            for own in {id(each): each for each in copies}.values():
                put(own, "bias_activation_fusion", gated)
                if getattr(own, "fp8", None):  # layers in 16 bits save more
                    put(own, "fp8", None)
        if engine:
            put(attention, "apply_rotary_pos_emb", lambda t, *how, **more: t.clone())
            unfused = getattr(getattr(config, "attention_backend", None), "name", "") == "unfused"
            put(F, "scaled_dot_product_attention", _unfused if unfused else _fused)
            put(DotProductAttention, "fused", not unfused)
        yield


def _fused(query, key, value, *how, **more):
    """Attention that saves what a fused kernel saves: its inputs, and one number for each head and token. The layer
    behind it saves the output. PyTorch's own attention saves scores where the processor has no fused kernel (PyTorch
    2.6: where heads share keys and values)."""
    sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    attend = lambda q, k, v, sums: (_unfused(q, k, v, *how, **more) * sums.unsqueeze(-1)).type_as(q)
    return SavesInputs.apply(attend, query, key, value, sums)


def _unfused(query, key, value, mask, dropout, causal, *, scale, enable_gqa):
    """Attention that saves its scores, once, like Transformer Engine's ``UnfusedDotProductAttention``."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    return F.dropout(torch.softmax(query @ key.transpose(2, 3), -1), dropout) @ value


def _dropout(x, p=0.5, training=True, inplace=False):
    return torch.native_dropout(x, p, training)[0] if p and training else x


MOST_NESTED = 20
"""The most nested backwards of recomputes; deeper nesting would never end."""


@contextlib.contextmanager
def _recomputes():
    """Let recomputes run without data. Megatron compares and restores states of random generators, which the ``meta``
    device does not have. If a recompute returns a parameter, as an MLP's does with its bias, torch treats the recompute
    as the function that made the parameter. Its backward then calls itself without end; this is turned into an error.
    """
    backward, begun = torch.autograd.backward, []

    def begin(*args, **how) -> None:
        if len(begun) > MOST_NESTED:
            raise RuntimeError("the backward of a recompute never ends; --recompute-modules mlp: --disable-bias-linear")
        begun.append(True)
        backward(*args, **how)
        begun.pop()

    names = {
        "_get_all_rng_states": lambda *args: (None, None, None),
        "_set_all_rng_states": lambda *args: None,
        "_fork_rng": contextlib.nullcontext,
    }
    with contextlib.ExitStack() as stack:
        for name, function in names.items():
            if hasattr(random, name):
                stack.enter_context(mock.patch.object(random, name, function))
        tracker = random.get_cuda_rng_tracker()
        stack.enter_context(mock.patch.object(tracker, "fork", lambda *args: contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(torch.autograd, "backward", begin))
        yield


class _OneMicroBatch:
    """Follows one micro-batch forward and backward through the layers of a chunk."""

    def __init__(self, num_layers: int, not_counted):
        self.saved = SavedTensors(not_counted, self._on_saved)
        self._begins = [0] * num_layers
        self._forward, self._base, self._recomputed = True, 0, 0

    def layer_begins(self, index: int):
        def hook(module, args, kwargs) -> None:
            if not self._forward:
                return  # this is a recompute inside the backward
            self._begins[index] = self.saved.bytes if index else 0
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(self._layer_is_done)

        return hook

    def _layer_is_done(self, gradient) -> None:
        """A layer's backward has ended: the tensors that it saved, or made again, are freed."""
        self._base = self.saved.bytes

    def _on_saved(self) -> None:
        if not self._forward:
            self._recomputed = max(self._recomputed, self.saved.bytes - self._base)

    def result(self, output: torch.Tensor) -> Saved:
        # If layers are recomputed together, some have freed what they saved when a later layer begins.
        held = [*accumulate([self.saved.bytes, *reversed(self._begins)], min)][::-1]
        by_layer = tuple(end - begin for begin, end in pairwise(held))
        self._forward, self._base = False, self.saved.bytes
        output.backward(torch.ones_like(output))
        return Saved(by_layer, self._recomputed)
