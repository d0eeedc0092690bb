"""Storages that a rank of a run holds throughout the iteration, by kind, for the census; and storages that it holds
before its first iteration."""

from collections import Counter
from collections.abc import Container, Iterator

import torch

from megatron_ext.megatron.buckets import buffers_of
from megatron_ext.megatron.copies import Copies
from megatron_ext.megatron.late_model import LateModel
from megatron_ext.megatron.own_rank import OwnRank
from megatron_ext.megatron.scheduled_host_step import HostStep
from megatron_ext.runtime.census import Resting, storage_bytes
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import FreedGroup


def resting_storages(
    own: OwnRank, copies: Copies, host_step: HostStep | None, reducer: Reducer | None, buffer_bytes: int
) -> Resting:
    """Bytes by kind on the device, and by kind in host memory.

    Args:
        copies: the node's host copies.
        host_step: the optimizer's host step, or None if Megatron makes it without us.
        reducer: the reducer of gradients that come and go, or None.
        buffer_bytes: of other buffers on the device through which parameters pass.
    """
    held: dict[str, Counter[str]] = {"device": Counter(), "host": Counter()}
    device, host = held.values()
    freed = [group for group in own.groups.values() if isinstance(group, FreedGroup)]
    for where, counter in held.items():
        counter["shards"] += storage_bytes(group.shard for group in freed if group.on_host is (where == "host"))
    gradients = [buffer.grad_data for ddp in own.ddps for buffer in buffers_of(ddp)]
    device["gradients"] += storage_bytes(gradients)
    device["buffers"] += buffer_bytes
    host["host_copies"] += 0 if copies.pool is None else copies.pool.own_bytes
    if host_step is not None:
        device["buffers"] += host_step.link.device_bytes
        host += host_step.held_bytes()
    if reducer is not None:
        host["staging_slots"] += reducer.staging_bytes
        for index, gradient in reducer.gradients.items():
            if index in reducer.on_host:
                host["gradients"] += storage_bytes([gradient.shard])
            else:  # the gradient lies in the storage of Megatron's buffer
                device["gradient_shards"] += gradient.shard.nbytes
                device["gradients"] -= gradient.shard.nbytes
    counted = [*gradients, *(t for group in own.groups.values() for t in (group.shard, group.whole))]
    known = {tensor.untyped_storage()._cdata for tensor in counted}
    for optimizer in own.optimizers:
        for where, kind, tensors in _of_optimizer(optimizer):
            new = [t for t in tensors if t.untyped_storage()._cdata not in known]
            held[where][kind] += storage_bytes(new)
            known |= {t.untyped_storage()._cdata for t in new}  # the host optimizer also lists parameters as states
    return dict(device), dict(host)


def held_on_host(ddps: list, late: LateModel | None, optimizers: list, on_drive: Container[int]) -> tuple[int, int]:
    """Bytes that a rank has in host memory before training begins: those that stay there, and all. Optimizer states of
    parameters in the storages ``on_drive`` will rest on the drive."""
    stays = [shard for ddp in ddps for buffer in buffers_of(ddp) for shard in getattr(buffer, "host_shards", ())]
    stays += [group.shard for group in late.groups.values() if group.on_host] if late is not None else ()
    leaves = []
    for inner in (one.optimizer for one in optimizers):
        for shard, copy in getattr(inner, "gpu_params_map_cpu_copy", {}).items():
            states, leaving = dict(inner.state.get(shard, {})), shard.untyped_storage()._cdata in on_drive
            if not (leaving and "left_out" in vars(inner)):  # copies that are left out are in files
                leaves.append(states.pop("master_param", None))  # if loaded, it is not the same as the copy
                (leaves if leaving else stays).extend((copy, *states.values()))
    return storage_bytes(filter(torch.is_tensor, stays)), storage_bytes(filter(torch.is_tensor, stays + leaves))


def _of_optimizer(optimizer) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    """``(where, kind, tensors)`` of the memory that an optimizer keeps."""
    inner = optimizer.optimizer
    copies = getattr(inner, "gpu_params_map_cpu_copy", None)
    if copies is None:
        main = [shard for group in optimizer.shard_fp32_from_float16_groups for shard in group if shard is not None]
        yield "device", "main_parameters", main
        yield "device", "optimizer_states", list(_states([inner]))
        return
    yield "host", "main_parameters", list(copies.values())
    yield "host", "optimizer_states", list(_states(inner.cpu_optimizers))
    yield "host", "gradients", list(inner.cpu_copy_map_grad.values())
    here = [own for parameter, own in inner.param_to_fp32_param.items() if parameter not in copies]
    yield "device", "main_parameters", here
    yield "device", "gradient_shards", [own.grad for own in here if own.grad is not None]
    yield "device", "optimizer_states", list(_states([inner.gpu_optimizer] if inner.gpu_optimizer else []))


def _states(optimizers: list) -> Iterator[torch.Tensor]:
    for one in optimizers:
        for state in list(one.state.values()):  # a delayed step may be adding states
            # A step count is a number that some releases keep as a tensor.
            yield from (value for value in list(state.values()) if isinstance(value, torch.Tensor) and value.dim())
