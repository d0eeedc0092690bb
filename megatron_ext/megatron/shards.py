"""Zero stage 3: the optimizer works on shards that outlive the whole copies.

[Note: Who holds views of a bucket]
Megatron's distributed optimizer takes views of its part of every bucket: fp32 parameters are
updated through them, and the fp32 copies of 16-bit parameters are written back through
``bucket.param_data``. Both are pointed at the group's shard, which has storage of its own, so
that a bucket can be freed at any time. Tensor objects stay the same: other parts of the
optimizer know them by identity.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.runtime.group import FreedGroup, Group, ScheduleError, State


class ShardOfBucket:
    """Stands in for ``bucket.param_data``: takes the indices of the whole bucket, has only the
    shard's elements. Indexing outside of the shard is an error."""

    def __init__(self, group: Group):
        self._shard, self._start, self._numel = group.shard, group.shard_start, group.whole.numel()

    def numel(self) -> int:
        return self._numel

    def view(self, *shape) -> "ShardOfBucket":
        assert shape == (-1,), "the distributed optimizer views buckets flat"
        return self

    def __getitem__(self, index: slice) -> torch.Tensor:
        start, stop = index.start - self._start, index.stop - self._start
        assert 0 <= start <= stop <= self._shard.numel(), "indexed outside of the own shard"
        return self._shard[start:stop]


def hold_shards(optimizers, groups: list[tuple[object, FreedGroup]]) -> None:
    """Point the optimizers' views of buckets at the shards of their groups.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank.
        groups: (bucket, group) of every group of this rank.
    """
    for _, group, start, end, shard in _pieces(optimizers, groups):
        shard.data = group.shard[start:end]
    for bucket, group in groups:
        setattr(bucket, "param_data", ShardOfBucket(group))  # noqa: B010 - upstream's attribute


def offloaded_shards(optimizers, groups: list[tuple[Any, Group]]) -> dict[int, Callable]:
    """Where the optimizer steps on the host, its own copies of each group's shard.

    Publishing takes them from there: the host copy then costs no copy from the device.

    Args:
        optimizers, groups: as for :func:`hold_shards`, with any kind of group.

    Returns:
        By group index a function that gives ``(start, host tensor)`` of every piece of the
        shard, or None while a piece is not offloaded. Groups that are never are left out.
    """
    pieces: dict[int, list] = {}
    for optimizer, group, start, _, shard in _pieces(optimizers, groups):
        copies = getattr(optimizer.optimizer, "gpu_params_map_cpu_copy", None)
        pieces.setdefault(group.index, []).append((start, shard, optimizer.optimizer if copies is not None else None))

    def source(own: list):
        def find():
            # Loading a checkpoint makes the copies anew, so they are looked up every time.
            found = [(start, optimizer.gpu_params_map_cpu_copy.get(shard)) for start, shard, optimizer in own]
            return None if any(copy is None for _, copy in found) else found

        return find

    return {index: source(own) for index, own in pieces.items() if all(optimizer is not None for *_, optimizer in own)}


def pieces_of_groups(optimizers, groups: list[tuple[Any, Group]]) -> list[tuple[Group, torch.Tensor]]:
    """The group of every part of a parameter that this rank updates, and the tensor by which the optimizer knows it."""
    return [(group, shard) for _, group, _, _, shard in _pieces(optimizers, groups)]


def _pieces(optimizers, groups):
    """``(optimizer, group, start, end, view)``: every part of a parameter that this rank updates,
    its place in the group's shard, and the tensor by which the optimizer knows it."""
    groups_of_buckets = {id(bucket): group for bucket, group in groups}
    for optimizer in optimizers:
        if getattr(optimizer, "is_stub_optimizer", False):
            continue
        for models, shards in (
            (optimizer.model_float16_groups, optimizer.shard_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ):
            for model_group, shard_group in zip(models, shards, strict=True):
                for parameter, shard in zip(model_group, shard_group, strict=True):
                    buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
                    group = groups_of_buckets[id(optimizer.buffers[buffer].buckets[bucket])]
                    place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                    yield optimizer, group, place.start - group.shard_start, place.end - group.shard_start, shard


class _Whole:
    """Stands before what gives a chunk's state away, which a deep copy of the chunk does too. The copy has
    parameters of its own, which nobody frees."""

    def __init__(self, groups: list[Group], sharded_state_dict):
        self.groups, self.inner = groups, sharded_state_dict

    def __deepcopy__(self, memo) -> "_Whole":
        # A module's hooks are copied before its children: no parameter has been read yet, of whose memory
        # there may be none.
        self.check()
        return _Whole([], copy.deepcopy(self.inner, memo))

    def check(self, *state_dict_arguments) -> None:
        for group in self.groups:
            if group.state is not State.WHOLE:
                raise ScheduleError(
                    f"{group} is {group.state.value}: call megatron_ext.megatron.hooks.unshard_all() on all ranks "
                    "before parameters are saved or copied"
                )

    def sharded_state_dict(self, *args, **kwargs):
        self.check()
        return self.inner(*args, **kwargs)


def refuse_state_of_freed(module: torch.nn.Module, groups: list[Group]) -> None:
    """Make ``state_dict`` and deep copies of a chunk fail while one of its groups is freed: the file could be
    written but never be loaded, and a copy would read memory that is not there."""
    whole = _Whole(groups, getattr(module, "sharded_state_dict", None))
    module.register_state_dict_pre_hook(whole.check)
    if whole.inner is not None:
        vars(module)["sharded_state_dict"] = whole.sharded_state_dict
