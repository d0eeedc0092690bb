"""Count the bytes that Megatron's host optimizer moves by itself, for parameters that are in none of our units.

It copies every gradient to host memory in fp32. The CPU rounds new parameters, which are then copied back.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, the same in core_v0.12 to core_v0.19.
"""

from collections.abc import Collection
from functools import partial

import torch

from megatron_ext.megatron.host_optimizers import gradient_of
from megatron_ext.megatron.own_rank import OwnRank
from megatron_ext.megatron.shards import places_of_groups, steps_on_the_host
from megatron_ext.runtime.host_step.unit import held_bytes
from megatron_ext.runtime.recorder import Recorder


def count_own_steps(own: OwnRank, recorder: Recorder, units: Collection[torch.optim.Optimizer]) -> None:
    """Count the bytes of the steps of Megatron's optimizers on the host, except those of ``units``."""
    for optimizer in own.optimizers:
        if not steps_on_the_host(optimizer):
            continue
        hybrid, kept = optimizer.optimizer, {}
        for _, group, _, _, shard in places_of_groups([optimizer], own.buckets):
            kept[hybrid.gpu_params_map_cpu_copy.get(shard)] = shard, own.schedule.groups[group.index]
        for one in hybrid.cpu_optimizers:
            if one not in units:
                one.register_step_post_hook(partial(_count, recorder, kept))


def _count(recorder: Recorder, kept: dict, one: torch.optim.Optimizer, *_) -> None:
    for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
        shard, group = kept[parameter]
        cast = shard.nbytes if shard.dtype is not parameter.dtype or group.shard_rests == "host" else 0
        recorder.moved("step", "host_memory", parameter.nbytes + 2 * held_bytes(one, parameter) + cast)
        if group.shard_rests != "host":
            recorder.moved("shard", "to_device", shard.nbytes)
        if group.gradients == "host":
            gradient = gradient_of(shard)
            recorder.moved("step", "host_memory", parameter.nbytes + (0 if gradient is None else gradient.nbytes))
        else:
            recorder.moved("gradient", "to_host", parameter.nbytes)
