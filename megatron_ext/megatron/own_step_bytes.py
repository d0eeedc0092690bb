"""Counts what Megatron's host optimizer moves by itself, where none of our units does.

It copies every gradient to host memory in fp32, and every new parameter back, which the processor rounds before.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, the same in core_v0.12 to core_v0.19.
"""

from collections.abc import Callable, Collection
from functools import partial

import torch

from megatron_ext.formats.moved_bytes import Row
from megatron_ext.megatron.shards import places_of_groups, steps_on_the_host
from megatron_ext.runtime.host_step.delayed import DelayedUpdate
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.user_defined_schedule import Group as Planned
from megatron_ext.schedule.user_defined_schedule import Schedule


def count_own_steps(
    schedule: Schedule, optimizers: list, buckets: list, recorder: Recorder, units: Collection[torch.optim.Optimizer]
) -> None:
    """Count the steps of Megatron's ``optimizers`` on the host, those of ``units`` left out.

    Args:
        buckets: (bucket, group) of every group of this rank.
    """
    for optimizer in optimizers:
        if not steps_on_the_host(optimizer):
            continue
        hybrid, kept = optimizer.optimizer, {}
        for group, _, _, shard in places_of_groups([optimizer], buckets):
            kept[hybrid.gpu_params_map_cpu_copy.get(shard)] = shard, schedule.groups[group.index]
        for one in hybrid.cpu_optimizers:
            if one not in units:
                one.register_step_post_hook(partial(_count, recorder, kept))


def _count(recorder: Recorder, kept: dict, one: torch.optim.Optimizer, *_) -> None:
    for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
        shard, group = kept[parameter]
        states = [value for value in one.state[parameter].values() if torch.is_tensor(value) and value.dim()]
        held = {id(tensor): tensor.nbytes for tensor in (parameter, *states)}
        cast = shard.nbytes if shard.dtype is not parameter.dtype or group.shard_rests == "host" else 0
        recorder.moved("step", "host_memory", parameter.nbytes + 2 * sum(held.values()) + cast)
        if group.shard_rests != "host":
            recorder.moved("shard", "to_device", shard.nbytes)
        recorder.moved(*gradient_row(shard, parameter.nbytes, group))


def gradient_row(shard: torch.Tensor, size_bytes: int, group: Planned) -> Row:
    """Megatron's copy of a gradient, ``size_bytes`` in fp32, to memory that it keeps."""
    if group.gradients == "host":
        gradient = getattr(shard, "decoupled_grad", shard.grad)
        return "step", "host_memory", size_bytes + (0 if gradient is None else gradient.nbytes)
    return "gradient", "to_host", size_bytes


def count_delayed(
    schedule: Schedule, optimizers: list, buckets: list, recorder: Recorder, delayed: DelayedUpdate
) -> None:
    """Count what applying a delayed update moves, and copying the gradients of all parameters for the next."""
    for optimizer in optimizers:
        places = [(shard, schedule.groups[group.index]) for group, *_, shard in places_of_groups([optimizer], buckets)]
        for shard, group in places:
            passes = 2 if group.shard_rests == "host" else 1
            delayed.rows.append(("shard", "host_memory" if passes == 2 else "to_device", passes * shard.nbytes))
        copy = optimizer.optimizer._set_sub_optimizer_grads
        vars(optimizer.optimizer)["_set_sub_optimizer_grads"] = partial(_copy_counted, copy, places, recorder)


def _copy_counted(copy: Callable[[], None], places: list[tuple[torch.Tensor, Planned]], recorder: Recorder) -> None:
    copy()
    for shard, group in places:
        recorder.moved(*gradient_row(shard, shard.numel() * torch.float32.itemsize, group))
