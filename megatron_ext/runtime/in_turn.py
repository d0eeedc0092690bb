"""Whole groups one after the other, for what reads parameters outside of training steps.

[Note: Models that never fit whole]
A schedule may be for less device memory than all parameters of a rank take. Then nothing ever brings them whole
together: an evaluation gathers the groups of a layer before it computes and frees them behind it, and whoever reads
parameters (a hash, a checkpoint) gets one group at a time. Whole groups take no more bytes at once than in training,
and come from the same pool.
"""

from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate

import torch

from megatron_ext.runtime.group import Clock, Group, ScheduleError, State
from megatron_ext.runtime.program import Layers
from megatron_ext.runtime.step_calls import StepCalls


class InTurn(StepCalls):
    """Of one rank. As what Megatron's schedules call around their steps it serves iterations without a backward.

    Args:
        groups: this rank's groups by index.
        gather: ``gather(group) -> handle``; a collective of the data-parallel ranks.
        layers: of this rank's chunks.
        chunks: by group the number of its model chunk.
        most_bytes: of whole groups at a time; what a layer needs is brought in any case.

    Attributes:
        evaluated: called when the last forward of an iteration without backwards has ended.
    """

    def __init__(
        self,
        groups: dict[int, Group],
        clock: Clock,
        gather: Callable,
        layers: Layers,
        chunks: dict[int, int],
        most_bytes: int,
    ):
        self.groups, self.clock, self._gather, self._layers = groups, clock, gather, layers
        self._chunks, self._most_bytes = chunks, most_bytes
        self.evaluated: Callable[[], None] = lambda: None
        self._of_storage = {group.whole.untyped_storage()._cdata: index for index, group in groups.items()}

    def group_of(self, tensor: torch.Tensor) -> int | None:
        """The group whose whole copy ``tensor`` is a part of; None: none."""
        return self._of_storage.get(tensor.untyped_storage()._cdata)

    def groups_of(self, storages: Collection[int]) -> list[int]:
        """The groups whose whole copies lie in ``storages``, by their ``_cdata``."""
        return sorted(map(self._of_storage.__getitem__, storages))

    def missing(self, storages: Collection[int]) -> bool:
        """Whether one of the groups in ``storages`` is not whole."""
        return any(self.groups[self._of_storage[storage]].state is not State.WHOLE for storage in storages)

    def check_room(self, wanted: Collection[int]) -> None:
        """Raise ScheduleError where several groups are more than may be whole at a time."""
        need = sum(self.groups[index].bytes for index in wanted)
        if len(wanted) > 1 and need > self._most_bytes:
            raise ScheduleError(
                f"{need} bytes of parameters are used at once, {need - self._most_bytes} more than limits.device_bytes "
                "leaves room for: use them one after the other, or where the device has the memory call "
                "megatron_ext.megatron.hooks.unshard_all() on all ranks before"
            )

    def bring(self, wanted: Collection[int], ahead: Collection[int] = (), adopt: bool = False) -> None:
        """Let the groups ``wanted`` be whole, those ``ahead`` on their way, and no others. Collective. ``adopt``: those
        that were whole may have been changed, and their shards take the values."""
        for index, group in self.groups.items():
            if index not in wanted and index not in ahead and group.state is not State.SHARDED:
                if adopt:
                    group.adopt()
                group.drop()
        for group in map(self.groups.__getitem__, (*wanted, *ahead)):
            if group.state is State.SHARDED:
                group.unshard(self._gather, self.clock)
        for group in map(self.groups.__getitem__, wanted):
            if group.state is State.UNSHARDING:
                group.wait(self.clock)

    # Iterations without a backward.

    def pre_forward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """A forward of a chunk begins."""
        self._before_layer(model_chunk_id, 0)
        for layer in range(1, self._layers.num_layers(model_chunk_id)):
            self._layers.arm(model_chunk_id, layer, (partial(self._before_layer, model_chunk_id, layer),), ())()

    def _before_layer(self, chunk: int, layer: int) -> None:
        """Bring what the layer uses; and issue what the next ones use, as far as there is room."""
        uses = {index: self._layers.uses(index) for index in self.groups if self._chunks[index] == chunk}
        used = [index for index, (first, last) in uses.items() if first <= layer <= last]
        coming = sorted((index for index in uses if uses[index][0] > layer), key=lambda index: uses[index])
        sums = accumulate(
            (self.groups[index].bytes for index in coming), initial=sum(self.groups[i].bytes for i in used)
        )
        self.bring(used, coming[: sum(size <= self._most_bytes for size in sums) - 1])

    def end_iteration(self) -> None:
        """The last forward has ended."""
        self.bring(())
        self.evaluated()
