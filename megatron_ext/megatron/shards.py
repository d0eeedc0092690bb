"""Zero stage 3: the optimizer works on shards that outlive the whole copies.

[Note: Who holds views of a bucket]
Megatron's distributed optimizer takes views of its part of every bucket: fp32 parameters are
updated through these views, and the fp32 copies of 16-bit parameters are written back through
``bucket.param_data``. Here both point to the group's shard, which has storage of its own, so
that a bucket can be freed at any time. Tensor objects stay the same, because other parts of the
optimizer identify them by ``id``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_ext.megatron.buckets import READ_AT_ONCE
from megatron_ext.megatron.host_gradients import rest_on_host
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import FreedGroup, RankGroup
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.shards_on_host import HostShards
from megatron_ext.workload.state_layout import ROUNDING_BYTES


class ShardOf:
    """Replaces ``bucket.param_data``, or a parameter's ``main_grad``: it is indexed like the whole tensor but has only
    the shard's elements. Indexing outside the shard is an error.

    Args:
        shard: 1D tensor.
        start: element of the whole tensor at which the shard begins; negative if the shard begins before it.
        numel: number of elements of the whole tensor.
        device: parts that are indexed are copied to this device if they are elsewhere; None: nothing is copied.
        write: ``write(shard, values)`` replaces copies into indexed parts; None: the copies are made.
        recorder: the recorder that counts copies to ``device``.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        start: int,
        numel: int,
        device: torch.device | None = None,
        write: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
        recorder: Recorder = NOTHING,
    ):
        self._shard, self._start, self._numel, self.device, self._write = shard, start, numel, device, write
        self._recorder = recorder

    def numel(self) -> int:
        return self._numel

    def view(self, *shape) -> "ShardOf":
        assert shape == (-1,), "the distributed optimizer views buckets flat"
        return self

    def __getitem__(self, index: slice) -> "torch.Tensor | _Written":
        start, stop = index.start - self._start, index.stop - self._start
        assert 0 <= start <= stop <= self._shard.numel(), "indexed outside of the own shard"
        if self._write is not None:
            return _Written(self._shard[start:stop], self._write)
        found = self._shard[start:stop]
        if self.device is None:
            return found
        self._recorder.moved("gradient", "to_device", found.nbytes)
        here, before = found.to(self.device), index.start % READ_AT_ONCE  # see [Note: Where gradients begin]
        if here.storage_offset() % READ_AT_ONCE == before:
            return here
        return torch.empty(before + len(here), dtype=here.dtype, device=here.device)[before:].copy_(here)


class _Written:
    """Replaces a part of a shard, to whose ``data`` Megatron copies new parameters."""

    def __init__(self, shard: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], None]):
        self._shard, self._write = shard, write

    @property
    def data(self) -> "_Written":
        return self

    def copy_(self, values: torch.Tensor) -> None:
        self._write(self._shard, values)


def hold_shards(optimizers, groups: list[tuple[object, FreedGroup]], recorder: Recorder = NOTHING) -> HostShards | None:
    """Make the optimizers' views of buckets point to the shards of their groups.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank.
        groups: ``(bucket, group)`` for every group of this rank.

    Returns:
        What writes shards in host memory if the optimizer steps on the device; None if there are no such shards.
    """
    for _, group, start, end, shard in places_of_groups(optimizers, groups):
        shard.data = group.shard[start:end]
    writer = _writer(optimizers, groups, recorder)
    for bucket, group in groups:
        write = writer.write if writer is not None and group.on_host else None
        shard = ShardOf(group.shard, group.shard_start, group.whole.numel(), write=write)
        setattr(bucket, "param_data", shard)  # noqa: B010 - upstream's attribute
    return writer


def _writer(optimizers, groups: list[tuple[object, FreedGroup]], recorder: Recorder) -> HostShards | None:
    on_host = [(bucket, group) for bucket, group in groups if group.on_host]
    if not on_host or any(map(steps_on_the_host, optimizers)):
        return None
    whole = on_host[0][1].whole
    longest = max(
        min(parameter.numel(), group.shard.numel())
        for bucket, group in on_host
        for parameter in getattr(bucket, "params_list")  # noqa: B009 - upstream's attribute
    )
    numel = min(longest, ROUNDING_BYTES // whole.element_size())
    return HostShards(numel, whole.dtype, whole.device, device_of(whole), recorder)


class HeldGradient(NamedTuple):
    """Where the optimizer finds a gradient that comes and goes.

    Attributes:
        parameters: parameters of the gradient's group.
        shard: this rank's part of the gradient.
        start: element of the storage of ``main_grad`` at which the shard begins.
        on_host: the shard lies in host memory; an optimizer that steps on the device gets it on ``device``.
    """

    parameters: Iterable[torch.nn.Parameter]
    shard: torch.Tensor
    start: int
    on_host: bool
    device: torch.device


def hold_gradients(optimizers, held: list[HeldGradient], recorder: Recorder = NOTHING) -> None:
    """Let the optimizers take gradients that come and go from their shards.

    An optimizer that steps on the host reads shards that are in host memory directly; the CPU computes their norm and
    clips them, see host_gradients.py. Any other optimizer gets copies of them on the device when it takes them. The
    copies stay there until its step has ended.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank.
        held: all gradients that come and go.
    """
    for optimizer in optimizers:
        steps_on_host, standing = steps_on_the_host(optimizer), {}
        for gradient in held:
            own = [parameter for parameter in gradient.parameters if parameter in optimizer.model_param_gbuf_map]
            if own and steps_on_host and gradient.on_host:
                rest_on_host(gradient.shard)
            for parameter in own:
                whole: torch.Tensor = getattr(parameter, "main_grad")  # noqa: B009 - Megatron's attribute
                start, device = gradient.start - int(whole.storage_offset()), gradient.device
                device = device if gradient.on_host and not steps_on_host else None
                standing[parameter] = ShardOf(gradient.shard, start, parameter.numel(), device, recorder=recorder)
        if standing:
            take = optimizer._copy_model_grads_to_main_grads
            optimizer._copy_model_grads_to_main_grads = in_place_of_gradients(standing)(take)


def steps_on_the_host(optimizer) -> bool:
    """Whether Megatron's DistributedOptimizer ``optimizer`` has its host optimizer (``--optimizer-cpu-offload``)."""
    return hasattr(getattr(optimizer, "optimizer", None), "gpu_params_map_cpu_copy")


@contextmanager
def in_place_of_gradients(standing: dict) -> Iterator[None]:
    """In this context each parameter in ``standing`` has its entry in place of its ``main_grad``."""
    whole = {parameter: parameter.main_grad for parameter in standing}
    for parameter, entry in standing.items():
        parameter.main_grad = entry
    try:
        yield
    finally:
        for parameter, gradient in whole.items():
            parameter.main_grad = gradient


def offloaded_shards(optimizers, groups: list[tuple[object, RankGroup]]) -> dict[int, Callable]:
    """The host optimizer's own copies of each group's shard, if the optimizer steps on the host.

    Groups are published from these copies, so that no copy from the device is needed.

    Args:
        optimizers, groups: as for :func:`hold_shards`, with any kind of group.

    Returns:
        By group index, a function that returns ``(start, host tensor)`` for every piece of the shard. A shard of
        padding alone has no pieces: its flag must be of the same kind as on other ranks, whose streams or issuing
        threads wait for it.
    """
    if not all(map(steps_on_the_host, optimizers)):
        return {}
    pieces: dict[int, list] = {group.index: [] for _, group in groups}
    for optimizer, group, start, _, shard in places_of_groups(optimizers, groups):
        pieces[group.index].append((start, shard, optimizer.optimizer))

    def source(own: list) -> Callable:
        # Loading a checkpoint makes new copies, so they are looked up every time.
        return lambda: [(start, optimizer.gpu_params_map_cpu_copy[shard]) for start, shard, optimizer in own]

    return {index: source(own) for index, own in pieces.items()}


def places_of_groups(optimizers, groups) -> Iterator[tuple[Any, RankGroup, int, int, torch.Tensor]]:
    """``(optimizer, group, start, end, view)`` for every part of a parameter of ``groups`` that this rank updates: its
    place in the group's shard, and the tensor by which the optimizer identifies it.

    Args:
        optimizers, groups: as for :func:`hold_shards`, with any kind of group. Parts of other groups are left out.
    """
    groups_of_buckets = {id(bucket): group for bucket, group in groups}
    for optimizer in optimizers:
        for models, shards in (
            (optimizer.model_float16_groups, optimizer.shard_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ):
            for model_group, shard_group in zip(models, shards, strict=True):
                for parameter, shard in zip(model_group, shard_group, strict=True):
                    buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
                    group = groups_of_buckets.get(id(optimizer.buffers[buffer].buckets[bucket]))
                    if group is None:
                        continue
                    place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                    yield optimizer, group, place.start - group.shard_start, place.end - group.shard_start, shard
