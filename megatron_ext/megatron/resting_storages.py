"""Storages that a rank of a run holds throughout the iteration, by kind, for the census."""

from collections.abc import Iterator

import torch

from megatron_ext.megatron.buckets import buffers_of
from megatron_ext.megatron.copies import Copies
from megatron_ext.megatron.scheduled_host_step import HostStep
from megatron_ext.runtime.census import storage_bytes
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import FreedGroup, Group
from megatron_ext.runtime.host_step.room import OwnRooms, SharedRooms


def resting_storages(
    groups: dict[int, Group],
    ddps: list,
    optimizers: list,
    copies: Copies,
    host_step: HostStep | None,
    routes: list,
    reducer: Reducer | None,
    buffers: list[torch.Tensor],
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind on the device, and by kind in host memory.

    Args:
        optimizers: Megatron's DistributedOptimizer objects.
        copies: the node's host copies.
        host_step: of the optimizer, or None where Megatron makes it alone.
        routes: whose gathers go through buffers.
        reducer: of the gradients that come and go, or None.
        buffers: on the device, through which parameters pass.
    """
    freed = [group for group in groups.values() if isinstance(group, FreedGroup)]
    device = {
        "shards": storage_bytes(group.shard for group in freed if not group.on_host),
        "gradients": storage_bytes(buffer.grad_data for ddp in ddps for buffer in buffers_of(ddp)),
    }
    device["buffers"] = sum(route.buffer_bytes for route in routes) + storage_bytes(buffers)
    host = {
        "host_copies": copies.own_bytes,
        "staging_slots": 0,
        "shards": storage_bytes(group.shard for group in freed if group.on_host),
    }
    if host_step is not None:
        _add_host_step(device, host, host_step)
    if reducer is not None:
        shards = {index: gradient.shard for index, gradient in reducer.gradients.items()}
        _add(host, "gradients", [shards[index] for index in reducer.on_host])
        host["staging_slots"] += reducer.staging_bytes
        # Those on the device lie in the storage of Megatron's buffer.
        kept = [shard for index, shard in shards.items() if index not in reducer.on_host]
        device["gradient_shards"] = sum(shard.numel() * shard.element_size() for shard in kept)
        device["gradients"] -= device["gradient_shards"]
    own = {group.shard.untyped_storage()._cdata for group in groups.values()}
    own |= {buffer.grad_data.untyped_storage()._cdata for ddp in ddps for buffer in buffers_of(ddp)}
    own |= {group.whole.untyped_storage()._cdata for group in groups.values()}
    for optimizer in optimizers:
        if getattr(optimizer, "is_stub_optimizer", False):
            continue
        for where, kind, tensors in _of_optimizer(optimizer):
            held = device if where == "device" else host
            new = [t for t in tensors if t.untyped_storage()._cdata not in own]
            _add(held, kind, new)
            own |= {t.untyped_storage()._cdata for t in new}  # the host optimizer lists its parameters as states, too
    return device, host


def _add_host_step(device: dict[str, int], host: dict[str, int], step: HostStep) -> None:
    device["buffers"] += step.link.device_bytes
    host["staging_slots"] += sum(states.slots_bytes for states in step.states)
    if isinstance(step.rooms, SharedRooms):
        host["staging_slots"] += step.rooms.bytes
    elif isinstance(step.rooms, OwnRooms):
        _add(host, "gradients", step.rooms.memory)
    if step.early is not None:
        _add(host, "previous_states", [step.early.memory])
    if step.delayed is not None:
        _add(host, "next_parameters", [staging for staging, _ in step.delayed.staged])


def _add(held: dict[str, int], kind: str, tensors: list[torch.Tensor]) -> None:
    held[kind] = held.get(kind, 0) + storage_bytes(tensors)


def _of_optimizer(optimizer) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    """``(where, kind, tensors)`` of what an optimizer keeps."""
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
        for state in list(one.state.values()):  # a delayed step may be making them
            # A step count is a number that some releases keep as a tensor.
            yield from (value for value in list(state.values()) if isinstance(value, torch.Tensor) and value.dim())
