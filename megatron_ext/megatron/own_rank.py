"""This rank of a scheduled run: the data from which its parts are made and which they share."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.megatron.buckets import buffers_of
from megatron_ext.megatron.late_model import LateModel
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import Clock, FreedGroup, RankGroup, WholeBytes
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.workload import Workload


@dataclass(kw_only=True, eq=False)
class OwnRank:
    """One rank of a run; complete when the model is laid out and the schedule was found to fit.

    Attributes:
        schedules: schedules by number of micro-batches, that of the full batch last; all have the same groups.
        workload: the workload of the complete model, from the chunks that all ranks hold.
        ddps: model chunks, laid out by :func:`buckets.lay_out_buckets`.
        bucket_groups: Megatron's bucket groups, by group index.
        optimizers: Megatron's DistributedOptimizer objects that have parameters to step.
        recorder: the recorder of issues and waits.
        nvme_path: directory for copies and optimizer states on the drive, if the schedule has any.
        delay: the arguments ``begun`` and ``after`` of :class:`DelayedUpdate`; None if no update is delayed.
        late: the model if it was built late, or None.
    """

    schedules: dict[int, Schedule] = field(default_factory=dict)
    workload: Workload = field(init=False)
    ddps: list = field(default_factory=list)
    bucket_groups: dict = field(default_factory=dict)
    optimizers: list = field(default_factory=list)
    recorder: Recorder = NOTHING
    nvme_path: object = None
    delay: tuple[int, int] | None = None
    late: LateModel | None = None
    clock: Clock = field(default_factory=Clock)
    issuer: Issuer = field(default_factory=Issuer)

    @property
    def schedule(self) -> Schedule:
        """The schedule of most iterations."""
        return next(reversed(self.schedules.values()))

    @cached_property
    def pp_rank(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    @cached_property
    def links(self) -> Recorder:
        """The recorder of links, which records in every iteration or not at all."""
        return self.recorder if self.recorder.counts else NOTHING

    @cached_property
    def process_groups(self) -> dict[int, dist.ProcessGroup]:
        """Megatron's process groups over which parameters are sharded, by their number of ranks: the data-parallel
        group and that of experts, within one optimizer instance."""
        buffers = [buffer for ddp in self.ddps for buffer in buffers_of(ddp)]
        found = {buffer.data_parallel_world_size: buffer.data_parallel_group for buffer in buffers}
        dense: Any = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        return found | {dist.get_world_size(dense): dense}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Megatron's data-parallel process group."""
        return self.process_groups[self.schedule.parallel.dp]

    @cached_property
    def residency(self) -> WholeBytes:
        """The counter of bytes of whole parameters."""
        return WholeBytes() if self.late is None else self.late.residency

    @cached_property
    def groups(self) -> dict[int, RankGroup]:
        """This rank's groups by index, over the storage of their buckets."""
        if self.late is not None:
            return dict(sorted(self.late.groups.items()))
        return {index: self._make_group(index) for index in sorted(self.bucket_groups)}

    def _make_group(self, index: int) -> RankGroup:
        (bucket,), entry = self.bucket_groups[index].buckets, self.schedule.groups[index]
        chunk, rank = f"chunk {entry.model_chunk_id}", dist.get_rank(self.process_groups[entry.ranks])
        if self.schedule.zero_stage == 3:
            on_host = entry.shard_rests == "host"
            group = FreedGroup(index, chunk, bucket.param_data, rank, entry.ranks, self.residency, on_host)
        else:
            group = RankGroup(index, chunk, bucket.param_data, rank, entry.ranks)
            self.residency.add(group.bytes)
        assert group.bytes == entry.bytes
        return group

    @cached_property
    def buckets(self) -> list:
        """``(bucket, group)`` for every group."""
        return [(self.bucket_groups[index].buckets[0], group) for index, group in self.groups.items()]

    @property
    def device(self):
        """The device of the groups, see :mod:`megatron_ext.runtime.device`; None if this rank has no groups."""
        return next((device_of(group.whole) for group in self.groups.values()), None)
