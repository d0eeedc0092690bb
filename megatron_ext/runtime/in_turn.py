"""Makes groups whole one after the other, for code that reads parameters outside of training steps.

[Note: Models that never fit whole]
A schedule may be for less device memory than all parameters of a rank take. Then all groups are never whole together.
An evaluation gathers the groups of a layer before it computes and frees them afterwards. Other readers of parameters (a
hash, a checkpoint) get one group at a time. Whole groups take no more bytes at once than in training, and come from the
same pool.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from megatron_ext.runtime.group import Clock, GroupState, RankGroup, ScheduleError
from megatron_ext.runtime.program import Layers
from megatron_ext.runtime.step_calls import StepCalls


@dataclass(eq=False)
class InTurn(StepCalls):
    """One instance per rank. For iterations without a backward it replaces the executor as the object that Megatron's
    schedules call around their steps.

    Args:
        groups: this rank's groups by index.
        gather: ``gather(group) -> handle``; a collective of the data-parallel ranks.
        layers: the layers of this rank's chunks.
        chunks: model chunk of each group, by group index.
        most_bytes: limit for the groups that are whole at once; the groups of one layer are brought in any case.

    Attributes:
        evaluated: called when the last forward of an iteration without backwards has ended.
    """

    groups: dict[int, RankGroup]
    clock: Clock
    gather: Callable
    layers: Layers
    chunks: dict[int, int]
    most_bytes: int
    evaluated: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._of_storage = {group.whole.untyped_storage()._cdata: index for index, group in self.groups.items()}

    def group_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the group whose whole copy contains ``tensor``, or None."""
        return self._of_storage.get(tensor.untyped_storage()._cdata)

    def groups_of(self, storages: Collection[int]) -> list[int]:
        """Indices of the groups whose whole copies lie in ``storages``, given by their ``_cdata``."""
        return sorted(map(self._of_storage.__getitem__, storages))

    def missing(self, storages: Collection[int]) -> bool:
        """Whether one of the groups in ``storages`` is not whole."""
        return any(self.groups[self._of_storage[storage]].state is not GroupState.WHOLE for storage in storages)

    def check_room(self, wanted: Collection[int]) -> None:
        """Raise ScheduleError if several groups together exceed the limit for whole groups."""
        need = sum(self.groups[index].bytes for index in wanted)
        if len(wanted) > 1 and need > self.most_bytes:
            raise ScheduleError(
                f"{need} bytes of parameters are used at once, {need - self.most_bytes} more than limits.device_bytes "
                "leaves room for: use them one after the other, or, if the device has enough memory, first call "
                "megatron_ext.megatron.hooks.unshard_all() on all ranks"
            )

    def bring(self, wanted: Collection[int], ahead: Collection[int] = (), adopt: bool = False) -> None:
        """Make the groups ``wanted`` whole, begin to gather those ``ahead``, and drop all others. Collective.
        ``adopt``: whole groups may have been changed, so their shards take the new values."""
        for index, group in self.groups.items():
            if index not in wanted and index not in ahead and group.state is not GroupState.SHARDED:
                if adopt:
                    group.adopt()
                group.drop()
        for group in map(self.groups.__getitem__, (*wanted, *ahead)):
            if group.state is GroupState.SHARDED:
                group.unshard(self.gather, self.clock)
        for group in map(self.groups.__getitem__, wanted):
            if group.state is GroupState.UNSHARDING:
                group.wait(self.clock)

    # Iterations without a backward.

    def pre_forward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """A forward of a chunk begins."""
        self._before_layer(model_chunk_id, 0)
        for layer in range(1, self.layers.num_layers(model_chunk_id)):
            self.layers.arm(model_chunk_id, layer, (partial(self._before_layer, model_chunk_id, layer),), ())()

    def _before_layer(self, chunk: int, layer: int) -> None:
        """Make the groups of the layer whole, and issue the gathers of the next layers as far as there is room."""
        uses = {index: self.layers.uses(index) for index in self.groups if self.chunks[index] == chunk}
        used = [index for index, (first, last) in uses.items() if first <= layer <= last]
        coming = sorted((index for index in uses if uses[index][0] > layer), key=lambda index: uses[index])
        size_of = lambda index: self.groups[index].bytes
        sums = accumulate(map(size_of, coming), initial=sum(map(size_of, used)))
        self.bring(used, coming[: sum(size <= self.most_bytes for size in sums) - 1])

    def end_iteration(self) -> None:
        """The last forward has ended."""
        self.bring(())
        self.evaluated()
