"""What Megatron allocates before training by a schedule begins, and what the schedule then has no use for.

[Note: Why copies are left out]
HybridDeviceOptimizer copies every parameter to the host in fp32 when it is built, and DistributedOptimizer builds it
twice: 8 bytes a parameter at a time when the drive holds nothing yet. The copy of a parameter whose states will rest
on the drive is left out: a single NaN in its shape stands in for it. :mod:`states_on_drive` writes the parameter itself
to the drive, in fp32, one slot after the other. Where something needs the copies before (a checkpoint is loaded), they
are made then.

[Note: Why gradients are left out]
DistributedDataParallel makes whole gradients of all parameters. :mod:`buckets` drops them and makes those that the
schedule keeps. Until then a single zero in their shape stands in for them.
"""

# Functions of Megatron are replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Iterable
from math import nan

import torch
from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode

storages_left_out: set[int] = set()
"""Of the parameters whose copies are left out."""


def leave_copies_out(parameters: Iterable[torch.Tensor]) -> None:
    """Host optimizers that are built from now on have no copies of what lies in the storages of ``parameters``."""
    storages_left_out.update(tensor.untyped_storage()._cdata for tensor in parameters)
    if not hasattr(HybridDeviceOptimizer, "without_copies"):
        HybridDeviceOptimizer.without_copies, HybridDeviceOptimizer.needs_copies = (), False
        sort_parameters = HybridDeviceOptimizer._get_sub_optimizer_param_groups
        HybridDeviceOptimizer._get_sub_optimizer_param_groups = lambda *given: _sorted(sort_parameters, *given)


def _sorted(sort_parameters, hybrid, offload_fraction: float):
    """What Megatron's function returns, with stand-ins for some copies."""
    late = lambda parameter: parameter.numel() > 1 and parameter.untyped_storage()._cdata in storages_left_out
    everything = hybrid.param_groups
    if (
        hybrid.needs_copies
        or offload_fraction != 1.0
        or not any(late(p) for group in everything for p in group["params"])
    ):
        return sort_parameters(hybrid, offload_fraction)
    hybrid.param_groups = [{**group, "params": [p for p in group["params"] if not late(p)]} for group in everything]
    host, device, copies, originals, in_fp32 = sort_parameters(hybrid, offload_fraction)
    hybrid.param_groups = everything
    left_out = {}
    for group in everything:
        chosen = [parameter for parameter in group["params"] if late(parameter)]
        for parameter in chosen:
            dtype = torch.float32 if hybrid.param_update_in_fp32 else parameter.dtype
            left_out[parameter] = copy = torch.full((), nan, dtype=dtype).expand(parameter.shape)
            copies[parameter], originals[copy] = copy, parameter
            if dtype != parameter.dtype:
                in_fp32[parameter] = copy
        if chosen:
            host.append({**group, "params": [left_out[parameter] for parameter in chosen]})
    hybrid.without_copies = left_out.items()
    _make_when_needed(hybrid)
    return host, device, copies, originals, in_fp32


def _make_when_needed(hybrid) -> None:
    @torch.no_grad()
    def make(*_) -> None:
        for parameter, copy in hybrid.without_copies:
            copy.data = parameter.detach().to("cpu", copy.dtype, copy=True)
        hybrid.without_copies, hybrid.needs_copies = (), True

    def update_by_new() -> None:
        make()
        HybridDeviceOptimizer.update_fp32_param_by_new_param(hybrid)

    hybrid.register_step_pre_hook(make)
    hybrid.register_load_state_dict_pre_hook(make)
    vars(hybrid)["update_fp32_param_by_new_param"] = update_by_new


def take_over(hybrid) -> dict[torch.Tensor, torch.Tensor]:
    """The parameters of ``hybrid`` by their copies that were left out; who calls this makes the copies."""
    found = {copy: parameter for parameter, copy in hybrid.without_copies}
    hybrid.without_copies = ()
    return found


class _OneZero(TorchFunctionMode):
    """``torch.zeros`` of ``dtype`` takes the memory of one element."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.zeros and kwargs.get("dtype") is self.dtype:
            return function(1, **kwargs).expand(*args)
        return function(*args, **kwargs)


def leave_gradients_out(wanted: Callable[[], bool]) -> None:
    """Buffers that are built while ``wanted()`` have no gradients; replaces the ``wanted`` of an earlier call."""
    Buffer = upstream._ParamAndGradBuffer
    if not hasattr(Buffer, "without_gradients"):
        build = Buffer.__init__

        def build_without(buffer, ddp_config, param_dtype, grad_dtype, *more, **named) -> None:
            shared = getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False) or param_dtype == grad_dtype
            if shared or not Buffer.without_gradients():
                return build(buffer, ddp_config, param_dtype, grad_dtype, *more, **named)
            with _OneZero(grad_dtype):
                build(buffer, ddp_config, param_dtype, grad_dtype, *more, **named)

        Buffer.__init__ = build_without
    Buffer.without_gradients = staticmethod(wanted)
