"""Lets Megatron's host optimizer (``--optimizer-cpu-offload``) keep the states of chosen groups on a drive.

[Note: What is changed of the host optimizer]
The parameters whose states rest on the drive get optimizers of their own, one a unit, see host_optimizers.py. Their
gradients come to the host by slots, or are used where they rest there. Where they may be stepped beside the backward
(``rollback_bytes``) a unit lies in one group, and gradients always come by slots: a step that is made before the norm
is known unscales a copy. All else is the host optimizer's own: values of param_groups, copies of the new parameters
back to the device.
Checkpoints take states from a method of Megatron's DistributedOptimizer. For these parameters it maps the drive's file
into memory, so that saving needs no memory for all states. What is loaded is loaded before: see late_memory.py.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, the same in core_v0.12 to core_v0.19.
"""

from functools import partial

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.host_optimizers import (
    copies_of,
    divide,
    gradient_of,
    own_optimizers,
    refuse_late_load,
    without,
)
from megatron_ext.megatron.late_memory import take_over
from megatron_ext.megatron.shards import pieces_of_groups
from megatron_ext.runtime.drive_states import DriveStates
from megatron_ext.runtime.group import Group
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.state_layout import region_bytes


def put_states_on_drive(
    schedule: Schedule,
    optimizers: list,
    buckets: list[tuple[object, Group]],
    nvme_path,
    device,
    recorder=None,
    delayed: bool = False,
) -> list[DriveStates]:
    """Move the states of groups that rest on the drive there. After this every optimizer step streams them.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank, with states or before their first step.
        buckets: (bucket, group) of every group of this rank.
        nvme_path: directory on the drive.
        delayed: the steps are made while the next iteration computes gradients, so Megatron copies all of them to
            memory that it keeps.

    Returns:
        One object an optimizer, to be closed with the run.

    Raises:
        InputError: the optimizer does not step on the host, a slot is too small, or the drive is full.
    """
    wanted = {index for index, group in enumerate(schedule.groups) if group.states_rest == "nvme"}
    if not wanted:
        return []
    in_place = {
        group.index
        for bucket, group in (() if delayed else buckets)
        if schedule.groups[group.index].gradients == "host" and getattr(bucket, "grad_data").dtype is torch.float32  # noqa: B009
    }
    made = []
    for optimizer in optimizers:
        own: dict[int, list] = {}
        for group, shard in pieces_of_groups([optimizer], buckets):
            if group.index in wanted:
                own.setdefault(group.index, []).append(shard)
        on_host = [shard for index in own.keys() & in_place for shard in own[index]]
        if own:
            how = (schedule, nvme_path, device, recorder)
            made.append(_one(optimizer, list(own.values()), on_host, delayed, *how))
    return made


def _one(
    optimizer, groups: list[list], on_host: list, delayed: bool, schedule: Schedule, nvme_path, device, recorder
) -> DriveStates:
    hybrid, early = optimizer.optimizer, schedule.rollback_bytes is not None
    shards = [shard for own in groups for shard in own]
    copies = copies_of(hybrid, shards, "states on the drive need", "groups[].states_rest")
    slots = schedule.state_slots
    assert slots is not None  # validated
    on_drive = list(copies.values())
    moments = 2 if issubclass(hybrid.cpu_optimizer_cls, torch.optim.AdamW | torch.optim.Adam) else 1
    largest = max(region_bytes(parameter.numel(), moments) for parameter in on_drive)
    if largest > slots.slot_bytes:
        raise InputError(
            f"a slot is smaller than the states of one parameter, which take {largest} bytes",
            field="state_slots.slot_bytes",
            value=slots.slot_bytes,
        )
    together = groups[::-1] if early else [shards]  # a backward reduces the last group first
    chosen = [{copies[shard] for shard in own} for own in together]
    size = lambda parameter: region_bytes(parameter.numel(), moments)
    divided = [unit for own in chosen for unit in divide(hybrid, own, size, slots.slot_bytes)]
    units = own_optimizers(hybrid, divided)
    settings = schedule.metadata.options.nvme or DriveReads()
    states = DriveStates(
        *(units, nvme_path),
        moments=moments,
        slots=slots.slots,
        settings=settings,
        device=device,
        recorder=recorder,
        initial=take_over(hybrid, set(on_drive)),
        gradients=None if delayed else {copies[shard]: partial(gradient_of, shard) for shard in shards},
        in_place=frozenset(copies[shard] for shard in on_host if not early),
        early=early,
    )
    if not delayed:
        vars(hybrid)["_set_sub_optimizer_grads"] = partial(
            _copy_other_gradients, hybrid, hybrid._set_sub_optimizer_grads, set(units), states
        )
    _save_from_drive(optimizer, states)
    refuse_late_load(hybrid)
    return states


def _copy_other_gradients(hybrid, copy_gradients, units: set, states: DriveStates) -> None:
    """In place of the host optimizer's copying of all gradients, into memory that it keeps."""
    with without(hybrid, units) as own:
        copy_gradients()
    states.gradients_ready(own)


def _save_from_drive(optimizer, states: DriveStates) -> None:
    """Let what Megatron takes of one parameter's states come from the drive."""
    get = optimizer._get_main_param_and_optimizer_states

    def read(parameter) -> dict[str, torch.Tensor]:
        group, order = optimizer.model_param_group_index_map[parameter]
        shard = optimizer.optimizer.param_groups[group]["params"][order]
        copy = optimizer.optimizer.gpu_params_map_cpu_copy.get(shard)
        if copy is None or states.unit_of(copy) is None:
            return get(parameter)
        in_memory = {name: value for name, value in get(parameter).items() if value.dim() == 0}  # the step count
        return in_memory | states.read_tensors(copy)

    vars(optimizer)["_get_main_param_and_optimizer_states"] = read
