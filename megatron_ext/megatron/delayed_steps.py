"""Lets Megatron's host optimizer (``--optimizer-cpu-offload``) step beside the next iteration.

[Note: What a delay changes of the host optimizer]
Its ``step`` copies gradients to the host as ever and hands the rest to :class:`DelayedUpdate`. There its own optimizers
step, with the learning rate, weight decay and all else of the iteration that the gradients are of. Behind each of them
Megatron copies the new parameters to the tensors that ``cpu_copys_map_gpu_param`` names: while a delayed step is made
these are staging tensors.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, the same in core_v0.12 to core_v0.19.
"""

from functools import partial

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.host_optimizers import refuse_late_load
from megatron_ext.runtime.delayed_update import DelayedUpdate

OPTION = "--delayed-parameter-update"


def line(delay: int) -> str:
    """What the option does, for the reader of a log."""
    return (
        f"{OPTION} {delay}: from iteration {delay + 1} on the host's optimizer steps beside the next iteration, which "
        "computes without that update; training is not the same as without the option"
    )


def optimizers_on_host(optimizers: list, delay: int) -> list:
    """Megatron's host optimizers of this rank. Raises InputError where some parameter is stepped elsewhere."""
    own = [one.optimizer for one in optimizers if not getattr(one, "is_stub_optimizer", False)]
    for one in own:
        copies = getattr(one, "gpu_params_map_cpu_copy", {})
        if any(parameter not in copies for group in one.param_groups for parameter in group["params"]):
            raise InputError(
                "needs an optimizer that steps on the host: --optimizer-cpu-offload with --optimizer-offload-fraction "
                "1.0",
                field=OPTION,
                value=delay,
            )
    return own


def delay_steps(optimizers: list, begun: int, delay: int, device, **how) -> DelayedUpdate:
    """Delay the updates of this rank from now on.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank, after a checkpoint was loaded.
        begun: training iterations that have ended before this run.
        delay: value of the option.
        how: the other arguments of :class:`DelayedUpdate`.

    Raises:
        InputError: an optimizer does not step on the host.
    """
    staged, hybrids = [], optimizers_on_host(optimizers, delay)
    maps = []
    for hybrid in hybrids:
        own = {}
        for shard, copy in hybrid.gpu_params_map_cpu_copy.items():
            own[copy] = device.host_tensor(shard.numel(), shard.dtype).view(shard.shape).copy_(shard.detach())
            staged.append((own[copy], shard))
        maps.append(own)
    delayed = DelayedUpdate(staged, begun, delay, device=device, **how)
    for hybrid, own in zip(hybrids, maps, strict=True):
        vars(hybrid)["step"] = partial(_step, hybrid, hybrid.step, own, delayed)
        refuse_late_load(hybrid)
    return delayed


def _step(hybrid, step, staging: dict, delayed: DelayedUpdate, closure=None) -> None:
    """In place of the host optimizer's ``step``."""
    if not delayed.delays:
        step(closure)
        return
    delayed.apply()
    hybrid._sync_hdo_param_groups_to_sub_optimizers()
    compute = torch.cuda.current_stream()
    hybrid._d2h_stream.wait_stream(compute)
    with torch.cuda.stream(hybrid._d2h_stream):
        hybrid._set_sub_optimizer_grads()
    compute.wait_stream(hybrid._d2h_stream)  # the next iteration overwrites gradients on the device
    hybrid._cpu_optimizer_map_data_event.clear()
    delayed.take(partial(_step_into, hybrid, staging))


def _step_into(hybrid, staging: dict) -> None:
    """Step; the new parameters go to the tensors of ``staging``, by host parameter."""
    shards = hybrid.cpu_copys_map_gpu_param
    hybrid.cpu_copys_map_gpu_param = staging
    try:
        for one in hybrid.cpu_optimizers:
            one.step()
    finally:
        hybrid.cpu_copys_map_gpu_param = shards
    hybrid._sync_sub_optimizers_state_to_hdo()
