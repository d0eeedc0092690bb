"""Transformer Engine's modules in plain PyTorch: their parameters by name, order and shape, and what they save.

Megatron builds its layers from Transformer Engine's modules by default. A machine without Transformer Engine, such as a
laptop, describes such a model with these modules. They are used even if Transformer Engine is installed, so that a
description does not depend on the machine. Training never uses them.

Sources: TransformerEngine v2.9, ``transformer_engine/pytorch/module`` (``linear.py``, ``layernorm_linear.py``,
``grouped_linear.py``, ``layernorm.py``, ``rmsnorm.py``) and ``pytorch/attention``: order of ``register_parameter``,
attributes of parameters.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from torch.nn import functional as F

VERSION = "2.8.0"
"""The version that the stand-in reports, from which Megatron decides which arguments modules take."""

PARTS = ("cross_entropy", "distributed", "fp8", "ops", "optimizers", "permutation", "router", "tensor")
PACKAGES = ("", ".common", ".common.recipe", ".pytorch", *(f".pytorch.{part}" for part in PARTS))


def empty(*shape: int, dtype=None) -> torch.nn.Parameter:
    """A parameter without values, which a description does not use. It is made on torch's default device, whatever
    device a module is given."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype))


class SavesInputs(torch.autograd.Function):
    """``function(*inputs)``, like a fused kernel that saves only its inputs; backward computes the function again."""

    @staticmethod
    def forward(ctx, function: Callable, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        nothing = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.enable_grad(), nothing:
            return None, *torch.autograd.grad(ctx.function(*inputs), inputs, gradient)


class LayerNorm(torch.nn.Module):
    """A layer norm with the parameters ``weight`` and ``bias``."""

    kind = "LayerNorm"

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype=None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,  # the name before 2.0
        **options,
    ):
        super().__init__()
        size = normalized_shape if hidden_size is None else hidden_size
        assert size is not None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        _add_norm(self, "", self.kind, size, params_dtype, sequence_parallel)

    def forward(self, x):
        return _norm(self.kind, x, self.weight, getattr(self, "bias", None), self.eps, self.zero_centered_gamma)


class RMSNorm(LayerNorm):
    """An RMS norm; its only parameter is ``weight``."""

    kind = "RMSNorm"


def _add_norm(module: torch.nn.Module, prefix: str, kind: str, size: int, dtype, sequence_parallel) -> None:
    for part in ("weight", "bias") if kind == "LayerNorm" else ("weight",):
        module.register_parameter(f"{prefix}{part}", parameter := empty(size, dtype=dtype))
        setattr(parameter, "sequence_parallel", sequence_parallel)  # noqa: B010 - no attribute of torch's


def _norm(kind: str, x, weight, bias, eps: float, zero_centered: bool):
    weight = weight + 1 if zero_centered else weight
    x = x.contiguous()  # copies query and key, which are parts of another tensor, so that it can be freed
    if kind == "RMSNorm":
        return SavesInputs.apply(lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, eps), x, weight)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


class Linear(torch.nn.Module):
    """A linear layer: ``weight`` and ``bias``, cut by ``parallel_mode`` over tensor-parallel ranks."""

    normalizes = False
    save_original_input = False  # Megatron sets it if an fp8 layer must not save its input in fp8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        tp_group=None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype=None,
        parallel_mode: str | None = None,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options,
    ):
        super().__init__()
        self.tp_size, self.tp_group, self.parallel_mode = tp_size, tp_group, parallel_mode
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        if self.normalizes:
            _add_norm(self, "layer_norm_", normalization, in_features, params_dtype, self.sequence_parallel)
        self.weight = empty(self.out_features, self.in_features, dtype=params_dtype)
        self.bias = empty(self.out_features, dtype=params_dtype) if bias else torch.Tensor()
        # Attributes that tell Megatron which parameters are cut, and along which dimension.
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        set_tensor_model_parallel_attributes(self.weight, True, 1 if parallel_mode == "row" else 0, 1)
        if bias and parallel_mode == "row":
            setattr(self.bias, "sequence_parallel", self.sequence_parallel)  # noqa: B010 - no attribute of torch's
        elif bias and parallel_mode == "column":
            set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def multiply(self, x, gather: Callable | None):
        """Multiply ``x`` by the weight, without bias. If ``gather`` makes ``x`` from the ranks' parts of a sequence,
        each rank saves its own part, and backward gathers again."""
        if gather is None:
            return F.linear(x, self.weight)
        return SavesInputs.apply(lambda x, weight: F.linear(gather(x), weight), x, self.weight)

    def forward(self, x, is_first_microbatch: bool | None = None, **options):
        """``x`` has shape (sequence, batch, in). With ``return_bias`` the bias is returned next to the result."""
        from megatron.core.tensor_parallel import mappings

        if self.normalizes:
            bias = getattr(self, "layer_norm_bias", None)
            x = _norm(self.normalization, x, self.layer_norm_weight, bias, self.eps, self.zero_centered_gamma)
        cut = self.parallel_mode if self.tp_size > 1 else None
        gather = None
        if cut == "column" and self.sequence_parallel:
            gather = mappings.gather_from_sequence_parallel_region
        elif cut == "column":
            x = mappings.copy_to_tensor_model_parallel_region(x)
        out = self.multiply(x, gather)
        if cut == "row":
            reduce = mappings.reduce_from_tensor_model_parallel_region
            out = mappings.reduce_scatter_to_sequence_parallel_region(out) if self.sequence_parallel else reduce(out)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """A norm and a linear layer: ``layer_norm_weight``, ``layer_norm_bias`` (not of RMSNorm), ``weight``, ``bias``."""

    normalizes = True


class DotProductAttention(torch.nn.Module):
    """Attention. Query, key and value have shape (sequence, batch, heads, channels). The only possible parameter is
    ``softmax_offset``, one number per head, with ``softmax_type="learnable"``.

    Attributes:
        fused: with a softmax of another type, only inputs are saved, and not the scores.
    """

    fused = True
    cp_group = cp_global_ranks = None  # Megatron's branch `dev` reads them

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels,
        *,
        attention_dropout: float = 0.0,
        softmax_scale=None,
        softmax_type: str = "vanilla",
        tp_size: int = 1,
        **options,
    ):
        super().__init__()
        self.dropout, self.scale, self.softmax_type = attention_dropout, softmax_scale, softmax_type
        if softmax_type == "learnable":
            self.softmax_offset = empty(num_attention_heads // tp_size)

    def forward(self, query, key, value, attention_mask=None, *, attn_mask_type: str = "causal", **options):
        # Transformer Engine saves copies if the three are not one tensor (get_qkv_layout), and their source is freed.
        q, k, v = (part.contiguous().permute(1, 2, 0, 3) for part in (query, key, value))
        causal = "causal" in attn_mask_type
        if self.softmax_type != "vanilla":
            offset = self.softmax_offset if self.softmax_type == "learnable" else torch.zeros(q.shape[1])
            assert causal, "softmax_type is there for causal attention"
            attend = partial(SavesInputs.apply, self._with_offset) if self.fused else self._with_offset
            return attend(q, k, v, offset).permute(2, 0, 1, 3).flatten(2)
        mask = None if causal or attention_mask is None else ~attention_mask
        out = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, causal, scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _with_offset(self, query, key, value, offset):
        """Causal attention without dropout, whose softmax has one more score per head: its offset."""
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = query @ key.transpose(2, 3) * (self.scale or query.shape[-1] ** -0.5)
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
        more = offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1] @ value


class GroupedLinear(torch.nn.Module):
    """A linear layer for each local expert: ``weight0``, ``bias0``, ``weight1``, ... Megatron itself cuts them over
    expert-tensor-parallel ranks, and brings the tokens."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype=None,
        **options,
    ):
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        for number in range(num_gemms):
            setattr(self, f"weight{number}", empty(out_features, in_features, dtype=params_dtype))
            if bias:
                setattr(self, f"bias{number}", empty(out_features, dtype=params_dtype))

    def forward(self, x, m_splits, is_first_microbatch: bool | None = None, **options):
        """``x`` has shape (tokens, in); ``m_splits`` are the numbers of tokens of each expert. With ``return_bias`` the
        biases are returned next to the result."""
        names = range(self.num_gemms)
        biases = [getattr(self, f"bias{number}") if self.use_bias else None for number in names]
        added = [None] * self.num_gemms if self.return_bias else biases
        parts = zip(torch.split(x, list(m_splits)), names, added)
        out = torch.cat([F.linear(part, getattr(self, f"weight{number}"), own) for part, number, own in parts])
        return (out, biases) if self.return_bias else out


class Padding(torch.nn.Module):
    """Padding of each expert's tokens in fp8 layers. A description cannot know how many tokens there are."""

    def __init__(self, *arguments, **options):
        super().__init__()


class QuantizedTensor:
    """A class that no tensor here has."""


class FP8GlobalStateManager:
    """Reports that fp8 is off."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False


def _operation(name: str) -> type:
    """A class for names that Megatron only mentions while it builds: single operations, in annotations and tables, and
    kernels that choose experts and sort tokens by expert (--moe-router-fusion, --moe-permute-fusion)."""
    if name.startswith("__"):
        raise AttributeError(name)
    return torch.nn.Sequential if name == "Sequential" else torch.nn.Module


def parallel_cross_entropy(logits, labels, *how):
    """The loss of every token. As much as ``logits`` is saved: the kernel writes their gradient over them."""
    loss = lambda logits: F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return SavesInputs.apply(loss, logits).view(labels.shape)


def fused_adam(params, exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, use_decoupled_grad, **options):
    """Never called: Megatron reads the names of its arguments, for --use-precision-aware-optimizer."""


def nothing(*arguments, **options):
    """A context that changes nothing."""
    return contextlib.nullcontext()


def install() -> None:
    """Let ``import transformer_engine`` find these modules. Call before Megatron is imported, which looks only once."""
    make_packages(f"transformer_engine{name}" for name in PACKAGES)
    vars(sys.modules["transformer_engine"])["__version__"] = VERSION
    fill(".common.recipe", DelayedScaling=SimpleNamespace)  # a recipe, which is never used to compute here
    fill(".pytorch.fp8", FP8GlobalStateManager=FP8GlobalStateManager, fp8_autocast=nothing, fp8_model_init=nothing)
    fill(".pytorch.cross_entropy", parallel_cross_entropy=parallel_cross_entropy)
    # The base class of Megatron's tracker, which is made only with --te-rng-tracker.
    fill(".pytorch.distributed", CudaRNGStatesTracker=object, activation_recompute_forward=nothing)
    fill(".pytorch.optimizers", FusedAdam=fused_adam)
    fill(".pytorch.tensor", QuantizedTensor=QuantizedTensor)
    fill(".pytorch.ops", __getattr__=_operation)
    fill(".pytorch.permutation", __getattr__=_operation)
    fill(".pytorch.router", __getattr__=_operation)
    fill(".pytorch", Fp8Padding=Padding, Fp8Unpadding=Padding)
    for kind in (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention, GroupedLinear):
        fill(".pytorch", **{kind.__name__: kind})


def make_packages(names: Iterable[str]) -> None:
    """Let ``import`` find empty packages with these full names; give outer packages first."""
    for name in names:
        module = sys.modules[name] = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def fill(package: str, **names: object) -> None:
    """Add ``names`` to a package of the stand-in."""
    vars(sys.modules[f"transformer_engine{package}"]).update(names)
