"""Lets Megatron's host optimizer (``--optimizer-cpu-offload``) keep the states of chosen groups on the device and step
them there.

[Note: What is changed of the host optimizer]
HybridDeviceOptimizer has an optimizer for the parameters that ``--optimizer-offload-fraction`` leaves on the device:
the last ones, by their number of elements. Here this optimizer steps the parameters of chosen groups: Megatron's
function sorts these with fraction 0, and all others with fraction 1.
What Megatron does not do for this optimizer, and is done here:
* Megatron moves loaded states to the device or the host by the class of the optimizer. Without Transformer Engine and
  Apex both classes are torch's AdamW, and states on the device would be moved to the host.
* Fused optimizers count steps in their parameter groups, which get the values of Megatron's groups before each step.
  After a load these contain the checkpoint's count, which would be restored each time. Here Megatron's groups follow
  the count, so that checkpoints also have it if all states are on the device.
* 16-bit gradients are cast on the stream of the copies to the host, and Megatron's step does not wait for that stream.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core_v0.12 to core_v0.19.
"""

# Functions of Megatron are replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterable
from functools import partial

import torch

from megatron_ext.megatron.host_optimizers import choose, gradient_of, is_chosen, sort_some
from megatron_ext.megatron.releases import host_optimizer_class

HybridDeviceOptimizer = host_optimizer_class()

ON_DEVICE = "on the device"


def keep_states_on_device(stored: Iterable[torch.Tensor]) -> None:
    """Let host optimizers that are built from now on step parameters in the storages of ``stored`` on the device."""
    choose(ON_DEVICE, stored)
    if not hasattr(HybridDeviceOptimizer, "on_device"):
        sort_parameters = HybridDeviceOptimizer._get_sub_optimizer_param_groups
        HybridDeviceOptimizer._get_sub_optimizer_param_groups = lambda *given: _sorted(sort_parameters, *given)
        HybridDeviceOptimizer.on_device = frozenset()


def _sorted(sort_parameters, hybrid, offload_fraction: float):
    """The result of Megatron's function, with chosen parameters on the device."""
    if "on_device" not in vars(hybrid):  # parameters are sorted again when a checkpoint is loaded
        parameters = (parameter for group in hybrid.param_groups for parameter in group["params"])
        hybrid.on_device = frozenset(parameter for parameter in parameters if is_chosen(ON_DEVICE, parameter))
    if offload_fraction != 1.0 or not hybrid.on_device:
        return sort_parameters(hybrid, offload_fraction)
    vars(hybrid).update(
        gpu_optimizer_cls=partial(_make_optimizer, hybrid), _move_new_state_to_right_device=partial(move_states, hybrid)
    )
    host = sort_some(sort_parameters, hybrid, lambda parameter: parameter not in hybrid.on_device, 1.0)
    device = sort_some(sort_parameters, hybrid, lambda parameter: parameter in hybrid.on_device, 0.0)
    assert not device[0] and not device[2], "a parameter that is not on the device"
    return host[0] + device[0], host[1] + device[1], *(a | b for a, b in zip(host[2:], device[2:], strict=True))


def _make_optimizer(hybrid, groups: list[dict]) -> torch.optim.Optimizer:
    made = hybrid.defaults["gpu_optimizer_cls"](groups)
    made.register_step_pre_hook(partial(wait_for_casts, hybrid))
    made.register_step_post_hook(partial(_follow_count, hybrid))
    return made


def wait_for_casts(hybrid, *_) -> None:
    """Wait for the casts of gradients before a step on the device: see the note above."""
    gradient = gradient_of(next(iter(hybrid.on_device)))
    if gradient is not None and gradient.dtype is not torch.float32:
        torch.cuda.current_stream().wait_stream(hybrid._d2h_stream)


def _follow_count(hybrid, optimizer, *_) -> None:
    counts = [group["step"] for group in optimizer.param_groups if "step" in group]
    for group in hybrid.param_groups if counts else ():
        group["step"] = max(counts)


def move_states(hybrid) -> None:
    """Replaces the host optimizer's function of this name."""
    HybridDeviceOptimizer._move_new_state_to_right_device(hybrid)
    on_host = not hybrid.defaults.get("fused")  # where torch's AdamW wants its step counts
    for parameter, state in hybrid.gpu_optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (value.dim() or not on_host):
                state[name] = value.to(parameter.device)
