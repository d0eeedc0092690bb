"""Lets gradients reach Megatron's host optimizer (``--optimizer-cpu-offload``), and parameters leave it, by slots.

[Note: What slots change of the host optimizer]
The parameters whose states are in host memory get optimizers of their own, one a unit, see host_optimizers.py. For them
:class:`StepSlots` copies gradients and new parameters, in place of the host optimizer's copying of all gradients into
memory that it keeps, and of its hook that copies parameters, through memory that is not page-locked and therefore one
after another. All else is its own.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, the same in core_v0.12 to core_v0.19.
"""

from collections.abc import Iterator
from functools import partial

import torch

from megatron_ext.megatron.host_optimizers import (
    copies_of,
    divide,
    gradient_of,
    own_optimizers,
    refuse_late_load,
    without,
)
from megatron_ext.megatron.shards import places_of_groups
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.slot_steps import PassingUnit, StepSlots
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.workload.state_layout import tensor_bytes


def step_through_slots(
    schedule: schedule_file.Schedule, optimizers: list, buckets: list[tuple[object, Group]], device
) -> StepSlots:
    """Give the host's optimizer slots, by a schedule that has ``step_slots``.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank, with states or before their first step.
        buckets: (bucket, group) of every group of this rank whose states are in host memory.

    Raises:
        InputError: the optimizer does not step on the host.
    """
    slots = schedule.step_slots
    assert slots is not None
    units = {optimizer: list(_units(schedule, optimizer, buckets)) for optimizer in optimizers}
    wide = all(getattr(bucket, "grad_data").dtype is torch.float32 for bucket, _ in buckets)  # noqa: B009
    how = (slots.slots, slots.slot_bytes, slots.cast, wide, buckets[0][1].whole.device, device)
    passing = StepSlots([unit for own in units.values() for unit in own], *how)
    for optimizer, own in units.items():
        if own:
            hybrid = optimizer.optimizer
            by_optimizer = {unit.optimizer: unit for unit in own}
            copy_others = partial(_expect, hybrid, hybrid._set_sub_optimizer_grads, by_optimizer, passing)
            vars(hybrid)["_set_sub_optimizer_grads"] = copy_others
            refuse_late_load(hybrid)
    return passing


def _units(schedule: schedule_file.Schedule, optimizer, buckets: list[tuple[object, Group]]) -> Iterator[PassingUnit]:
    """The units of one optimizer. Where they may be stepped beside the backward, each lies in one group."""
    slots, hybrid = schedule.step_slots, optimizer.optimizer
    assert slots is not None
    own_places = list(places_of_groups([optimizer], buckets))
    copies = copies_of(hybrid, [shard for *_, shard in own_places], "slots of the host's step need", "step_slots")
    shards: dict[torch.Tensor, torch.Tensor] = {}
    groups: dict[torch.Tensor, schedule_file.Group] = {}
    together: dict[int, set[torch.Tensor]] = {}
    for group, _, _, shard in own_places:
        parameter = copies[shard]
        shards[parameter], groups[parameter] = shard, schedule.groups[group.index]
        together.setdefault(0 if schedule.rollback_bytes is None else group.index, set()).add(parameter)
    size = lambda parameter: tensor_bytes(parameter.numel())
    divided = [one for chosen in together.values() for one in divide(hybrid, chosen, size, slots.slot_bytes)]
    for one in own_optimizers(hybrid, divided, copy_back=False) if divided else []:
        own = [parameter for group in one.param_groups for parameter in group["params"]]
        for parameter in own:
            hybrid.cpu_copy_map_grad.pop(parameter, None)
            parameter.grad = None
        yield PassingUnit(
            one,
            {parameter: partial(gradient_of, shards[parameter]) for parameter in own},
            {parameter: shards[parameter] for parameter in own},
            gradients_on_host=frozenset(parameter for parameter in own if groups[parameter].gradients == "host"),
            shards_on_host=frozenset(parameter for parameter in own if groups[parameter].shard_rests == "host"),
        )


def _expect(hybrid, copy_gradients, units: dict[torch.optim.Optimizer, PassingUnit], slots: StepSlots) -> None:
    """In place of the host optimizer's copying of all gradients, into memory that it keeps."""
    with without(hybrid, units) as own:
        copy_gradients()
    slots.expect([units[one] for one in own])
