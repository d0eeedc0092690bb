"""Lets Megatron's host optimizer (``--optimizer-cpu-offload``) step beside the backward.

[Note: What is changed of the host optimizer]
Every group gets an optimizer of its own, see host_optimizers.py, which :class:`EarlySteps` steps during the backward.
When Megatron calls the host optimizer's ``step``, it goes through the optimizers whose early step does not stand, as
ever; the others have done all that it would do. A step that Megatron skips is undone by ``EarlySteps.undo``.
Gradients that Megatron changes after their reduce, other than by one factor for all, cannot be validated: the
embedding that two pipeline ranks share, and norms that tensor-parallel ranks add up. Their groups wait.
Groups that are stepped through slots have optimizers of their own already, see states_on_drive.py and
steps_through_slots.py.
"""

from collections.abc import Callable
from functools import partial

import torch

from megatron_ext.megatron.host_optimizers import copies_of, divide, own_optimizers, refuse_late_load, without
from megatron_ext.megatron.shards import places_of_groups
from megatron_ext.runtime.drive_states import DriveStates
from megatron_ext.runtime.drive_unit import DriveUnit
from megatron_ext.runtime.early_steps import EarlySteps, StepUnit
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.slot_steps import SlotUnit, StepSlots
from megatron_ext.schedule.user_defined_schedule import Schedule


def step_beside_backward(
    schedule: Schedule,
    optimizers: list,
    bucket_groups: dict,
    groups: dict[int, Group],
    slots: list[DriveStates | StepSlots],
    **how,
) -> EarlySteps:
    """Make the units of this rank, by a schedule that has ``rollback_bytes``.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank, with states or before their first step.
        bucket_groups, groups: of this rank, by index in the schedule.
        slots: of this rank, through which the host's optimizers step already.
        how: the other arguments of :class:`EarlySteps`.

    Raises:
        InputError: the optimizer does not step on the host.
    """
    assert schedule.rollback_bytes is not None
    chosen = {
        index: groups[index]
        for index, bucket_group in bucket_groups.items()
        if schedule.groups[index].states_rest != "device" and not any(map(_added_up_later, bucket_group.params))
    }
    stepped: dict[int, list[StepUnit]] = {}
    hybrids = []
    for number, optimizer in enumerate(optimizers):
        stepped[number] = _units_of(optimizer, bucket_groups, chosen, slots)
        if stepped[number]:
            hybrids.append((optimizer.optimizer, stepped[number]))
    watched = [_Settings(hybrid) for hybrid, _ in hybrids]

    def begin() -> None:
        for settings in watched:
            settings.take()

    units = [unit for own in stepped.values() for unit in own]
    early = EarlySteps(units, schedule.rollback_bytes, begin, **how)
    for (hybrid, own), settings in zip(hybrids, watched):
        vars(hybrid)["step"] = partial(_step, hybrid, hybrid.step, own, settings, early)
        refuse_late_load(hybrid)
    for index in chosen:
        bucket_groups[index].reduced = partial(early.reduced, index)
    return early


def _added_up_later(parameter) -> bool:
    """Whether other ranks' gradients are added to this one's after its reduce."""
    names = ("shared_embedding", "shared", "sequence_parallel", "average_gradients_across_tp_domain")
    return any(getattr(parameter, name, False) for name in names)


def _units_of(optimizer, bucket_groups: dict, chosen: dict[int, Group], slots: list) -> list[StepUnit]:
    hybrid = optimizer.optimizer
    buckets = [(bucket_groups[index].buckets[0], group) for index, group in chosen.items()]
    own_places = list(places_of_groups([optimizer], buckets))
    copies = copies_of(hybrid, [s for *_, s in own_places], "a step beside the backward needs", "rollback_bytes")
    passing: dict[tuple[int, DriveStates | StepSlots, int], list] = {}  # by group, and the unit in slots
    places: dict[int, list] = {}  # by group, what does not pass through slots
    for group, start, end, shard in own_places:
        part = copies[shard], _reduced_part(bucket_groups[group.index], group)[start:end], shard
        found = [(one, unit) for one in slots if (unit := one.unit_of(part[0])) is not None]
        if found:
            passing.setdefault((group.index, *found[0]), []).append(part)
        else:
            places.setdefault(group.index, []).append(part)
    own = [unit for parts in places.values() for unit in divide(hybrid, {parameter for parameter, *_ in parts})]
    optimizers, how = own_optimizers(hybrid, own), partial(_by_parameter, optimizer)
    units = [_in_slots(*which, *how(own)) for which, own in passing.items()]
    return [*units, *(StepUnit(index, one, *how(places[index])) for index, one in zip(places, optimizers, strict=True))]


def _in_slots(group: int, slots: DriveStates | StepSlots, index: int, *of_step) -> StepUnit:
    if isinstance(slots, StepSlots):
        return SlotUnit(group, slots, index, *of_step)
    return DriveUnit(group, slots, index, *of_step)


def _by_parameter(optimizer, parts: list) -> tuple[dict, dict, Callable[[], float | None]]:
    """What a :class:`StepUnit` takes: gradients and shards by the host's parameter, and the factor."""
    gradients = {parameter: gradient for parameter, gradient, _ in parts}
    return gradients, {parameter: shard for parameter, _, shard in parts}, partial(_inverse_scale, optimizer)


def _reduced_part(bucket_group, group: Group) -> torch.Tensor:
    """This rank's part of a group's gradient, where it lies when it is reduced."""
    if bucket_group.gradient is not None:
        return bucket_group.gradient.shard
    gradient = bucket_group.buckets[0].grad_data
    return gradient.narrow(0, group.shard_start, group.shard.numel())


def _inverse_scale(optimizer) -> float | None:
    scaler = optimizer.grad_scaler
    return None if scaler is None else float(scaler.inv_scale)


class _Settings:
    """What the optimizer of a whole iteration is to step with: learning rate, weight decay and all else."""

    def __init__(self, hybrid):
        self.hybrid, self.taken = hybrid, []

    def take(self) -> None:
        self.hybrid._sync_hdo_param_groups_to_sub_optimizers()
        self.taken = self.now()

    def now(self) -> list[dict]:
        return [
            {name: value for name, value in group.items() if name != "params"} for group in self.hybrid.param_groups
        ]


def _step(hybrid, step, units: list[StepUnit], settings: _Settings, early: EarlySteps, closure=None) -> None:
    """In place of the host optimizer's ``step``: what has not been stepped early, or does not stand."""
    done = {unit.optimizer for unit in early.settle(units, changed=settings.taken != settings.now())}
    with without(hybrid, done):
        step(closure)
    hybrid._sync_sub_optimizers_state_to_hdo()
    early.ready = True
