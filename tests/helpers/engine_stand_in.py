"""Transformer Engine, Apex and a fused kernel in plain PyTorch, for training a real checkout by its default arguments.

``write_packages(folder)`` makes a directory for PYTHONPATH in which ``import transformer_engine`` finds the modules of
``megatron_ext.megatron.engine_modules`` with what training adds to them: gradients that are added into ``main_grad`` in
the middle of backward, FusedAdam with master weights and gradients under their own names, multi-tensor functions,
states without data in checkpoints, recompute. With ``engine=False`` it is Apex, whose Adam and weight-gradient kernel
Megatron takes where Transformer Engine is not. ``train_checkout.py`` trains by a script's default arguments.
"""

import contextlib
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.nn import functional as F

SHARED = {
    "fused_weight_gradient_mlp_cuda.py": "from engine_stand_in import wgrad_gemm_accum_fp16, wgrad_gemm_accum_fp32\n"
}
ENGINE = {
    "transformer_engine/__init__.py": "import engine_stand_in\nengine_stand_in.install_engine()\n",
    "transformer_engine_torch.py": "",
}
APEX = {
    "apex/__init__.py": "import engine_stand_in\nengine_stand_in.install_apex()\n",
    "amp_C.py": "from engine_stand_in import multi_tensor_l2norm, multi_tensor_scale\n",
}


def write_packages(folder: Path, *, engine: bool = True) -> str:
    """Write the files of Transformer Engine, or of Apex, and return what PYTHONPATH needs."""
    for name, text in (SHARED | (ENGINE if engine else APEX)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return f"{folder}:{Path(__file__).parent}"


# Weight gradients inside backward.


def wgrad_gemm_accum_fp32(total_input, grad_output, main_grad) -> None:
    """``main_grad`` (float32) grows by the weight's gradient; matrices of shape (rows, in) and (rows, out)."""
    main_grad.add_(grad_output.t().to(torch.float32) @ total_input.to(torch.float32))


def wgrad_gemm_accum_fp16(total_input, grad_output, main_grad) -> None:
    """The same for 16-bit gradients."""
    main_grad.add_(grad_output.t() @ total_input)


class FusedLinear(torch.autograd.Function):
    """A product whose weight gradient goes into ``weight.main_grad``; autograd is handed a tensor of no meaning.

    The weight is what autograd has saved and ``main_grad`` is the forward's, as in Megatron's
    ``LinearWithGradAccumulationAndAsyncCommunication``.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None)  # none with --skip-train, where nothing is wrapped
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad = ctx.main_grad
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        add = wgrad_gemm_accum_fp32 if weight.main_grad.dtype == torch.float32 else wgrad_gemm_accum_fp16
        add(rows, grads, weight.main_grad)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad @ weight, None
        weight.grad_added_to_main_grad = True
        return grad @ weight, get_dummy_wgrad(
            list(weight.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False)
        )


class _GatheredOverSequence(torch.autograd.Function):
    """All ranks' parts of a sequence, first dimension, one behind the other."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group, ctx.numel, ctx.dtype = group, part.shape[0], part.dtype
        whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        grad = grad.float()
        dist.all_reduce(grad, group=ctx.group)
        return grad.narrow(0, dist.get_rank(ctx.group) * ctx.numel, ctx.numel).to(ctx.dtype), None


def attend_over_ranks(query, key, value, group, dropout: float, scale) -> torch.Tensor:
    """Causal attention whose sequence lies on the ranks of ``group``: rank r has parts r and 2n - 1 - r of 2n."""
    ranks, part = dist.get_world_size(group), query.shape[0] // 2
    begins = [(rank * part, (2 * ranks - 1 - rank) * part) for rank in range(ranks)]
    places = [torch.cat([torch.arange(begin, begin + part) for begin in both]) for both in begins]
    key, value = (_GatheredOverSequence.apply(one, group) for one in (key, value))
    mask = places[dist.get_rank(group)][:, None] >= torch.cat(places)
    q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale, enable_gqa=True)
    return out.permute(2, 0, 1, 3).flatten(2)


class _Attention:
    """What context parallelism adds to the attention of ``engine_modules``."""

    def __init__(self, *arguments, cp_group=None, **options):
        super().__init__(*arguments, **options)
        self.cp_group = cp_group

    def forward(self, query, key, value, *arguments, **options):
        if self.cp_group is None or dist.get_world_size(self.cp_group) == 1:
            return super().forward(query, key, value, *arguments, **options)
        dropout = self.dropout if self.training else 0.0
        return attend_over_ranks(query, key, value, self.cp_group, dropout, self.scale)


def get_dummy_wgrad(shape: list, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """What stands for a gradient that is elsewhere: not a number, so that whoever uses it is seen."""
    return torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype)


class Initialized:
    """Parameters of a module of ``engine_modules`` get values as Transformer Engine's options say: matrices from a
    function (by default a normal distribution), with the random state of a tracker; norms are 1 and biases 0."""

    def __init__(self, *arguments, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, **options):
        super().__init__(*arguments, **options)
        self.fuse_wgrad_accumulation = options.get("fuse_wgrad_accumulation", False)
        named = [] if rng_tracker_name is None else [rng_tracker_name]
        for name, parameter in self.named_parameters():
            tracker = (
                contextlib.nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork(*named)
            )
            with torch.no_grad(), tracker:
                if parameter.dim() > 1 or name == "softmax_offset":
                    (init_method or partial(torch.nn.init.normal_, std=0.023))(parameter)
                else:
                    parameter.fill_(float("weight" in name and not options.get("zero_centered_gamma", False)))


class _Training:
    """What training adds to a module of ``engine_modules``."""

    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}  # Megatron asks grouped layers for it, whose states are split by expert

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """There is no fp8 here."""

    def multiply(self, x, gather):
        x = x if gather is None else gather(x)
        return FusedLinear.apply(x, self.weight) if self.fuse_wgrad_accumulation else F.linear(x, self.weight)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        """There is no fp8 here."""


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Apex's, with the arguments that Megatron's ``FusedLayerNorm`` looks for."""

    @staticmethod
    def forward(ctx, x, weight, bias, normalized_shape, eps, memory_efficient=False):
        y, mean, rstd = torch.native_layer_norm(x, normalized_shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape = normalized_shape
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        known = (grad, x, ctx.shape, mean, rstd, weight, bias, [True, True, True])
        return *torch.ops.aten.native_layer_norm_backward(*known), None, None, None


# Optimizer.


class FusedAdam(torch.optim.Optimizer):
    """AdamW, with the options of Transformer Engine's and Apex's classes of this name that Megatron uses.

    Source: TransformerEngine v2.6, ``transformer_engine/pytorch/optimizers/fused_adam.py``.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        *,
        capturable=False,
        master_weights=False,
        use_decoupled_grad=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        store_param_remainders=False,
    ):
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        assert adam_w_mode and not capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self.store_param_remainders = False

    def zero_grad(self, set_to_none=True):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            setattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)

    def initialize_state(self, parameter, store_param_remainders=False):
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][name] = torch.zeros_like(parameter, dtype=self.name_to_dtype_map[name])
        if self.master_weights:
            self.state[parameter]["master_param"] = parameter.detach().to(
                self.name_to_dtype_map["master_param"], copy=True
            )

    def get_unscaled_state(self, parameter, name):
        return self.state[parameter][name].float()

    def set_scaled_state(self, parameter, name, value):
        if name not in self.state[parameter]:
            self.state[parameter][name] = torch.empty_like(value, dtype=self.name_to_dtype_map[name])
        self.state[parameter][name].copy_(value)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad if self.use_decoupled_grad else parameter.grad
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                self._update(parameter, gradient.float(), group)

    def _update(self, parameter, gradient, group) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        mean = state["exp_avg"].float().lerp(gradient, 1 - first)
        square = state["exp_avg_sq"].float().mul(second).addcmul(gradient, gradient, value=1 - second)
        corrected = mean / (1 - first ** group["step"])
        root = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
        master = state["master_param"] if self.master_weights else parameter
        value = master.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * corrected / root
        master.copy_(value)
        parameter.copy_(value)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)


def multi_tensor_applier(function, overflow, lists, *arguments):
    return function(2048 * 32, overflow, lists, *arguments)


def multi_tensor_l2norm(chunk, overflow, lists, per_tensor=False):
    norms = [tensor.float().norm() for tensor in lists[0]]
    total = torch.stack(norms).norm() if norms else torch.zeros(())
    return total.view(1), torch.stack(norms) if per_tensor else None


def multi_tensor_scale(chunk, overflow, lists, scale):
    for source, target in zip(*lists):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk, overflow, lists, scale):
    multi_tensor_scale(chunk, overflow, lists, scale.item())


# Recompute.


def checkpoint(
    function, *arguments, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None, **options
):
    """Recompute ``function`` in backward, with the random states of its forward."""
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=True, **options)


# Packages.


def _package(name: str, **names) -> None:
    module = sys.modules.get(name) or ModuleType(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
    vars(module).update(names)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)


def install_engine() -> None:
    """Called by the package's own ``__init__``."""
    from megatron_ext.megatron import engine_modules

    engine_modules.install()
    engine = "transformer_engine.pytorch"
    optimizers = (FusedAdam, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale, multi_tensor_scale_tensor)
    _package(f"{engine}.optimizers", FusedSGD=torch.optim.SGD, **{one.__name__: one for one in optimizers})
    _package(f"{engine}.module")
    _package(f"{engine}.module.base", get_dummy_wgrad=get_dummy_wgrad)
    _package(f"{engine}.distributed", checkpoint=checkpoint)
    for kind in ("Linear", "LayerNormLinear", "LayerNorm", "RMSNorm", "DotProductAttention", "GroupedLinear"):
        base = getattr(sys.modules[engine], kind)
        added = {"multiply": _Training.multiply} if issubclass(base, engine_modules.Linear) else {}
        states = {name: one for name, one in vars(_Training).items() if "fp8" in name or "extra_state" in name}
        bases = (_Attention, Initialized, base) if kind == "DotProductAttention" else (Initialized, base)
        setattr(sys.modules[engine], kind, type(kind, bases, added | states))


def install_apex() -> None:
    """Called by the package's own ``__init__``."""
    _package("apex.optimizers", FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    _package("apex.multi_tensor_apply", multi_tensor_applier=multi_tensor_applier)
    _package("apex.normalization")
    _package("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=FusedLayerNormAffineFunction)
