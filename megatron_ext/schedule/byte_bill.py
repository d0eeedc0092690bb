"""The byte bill: the bytes that every rank moves in an iteration by a schedule, by kind and link.

[Note: What is billed]
* The bytes that the run issues, counted as the run counts them (:class:`megatron_ext.runtime.recorder.Recorder`): in
  the dtype in which they cross a link, with Megatron's padding if whole shards move, without it if parameters move.
* In the host's step each gradient is read once, each state is read and written, and each 16-bit parameter that the host
  makes is written. Bytes that an optimizer that is not fused reads again are not billed. All bytes are billed, also
  those that the processor's caches may hold.
* Steps during the backward are billed as if each of them ran, found room for the previous states, and was valid.

Not billed: messages between stages; zeroing, the norm and the clipping of gradients; and buffers on the device.
"""

from collections.abc import Iterator

from megatron_ext.formats.moved_bytes import ADD_PASSES, MovedBytes, Row, add_up, reduced_bytes
from megatron_ext.schedule.group_facts import can_step_early, gradient_bytes, members_of
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.workload.bucket_layout import ITEM_BYTES as ITEMS
from megatron_ext.workload.bucket_layout import shard_parts
from megatron_ext.workload.drive_reads import SECTOR_BYTES
from megatron_ext.workload.nodes import nodes_spanned
from megatron_ext.workload.route import ON_DRIVE, ON_HOST, kind_of
from megatron_ext.workload.state_layout import ITEM_BYTES, LINE_BYTES, region_bytes, tensor_bytes
from megatron_ext.workload.workload import Workload


def byte_bill(schedule: Schedule, workload: Workload) -> list[list[MovedBytes]]:
    """Bills by pipeline rank and data-parallel rank of one instance. Tensor-parallel ranks have equal bills. If experts
    are sharded among other ranks than dense parameters, there is one bill for each rank of a pipeline rank. The
    schedule must be valid and match the workload."""
    parallel = workload.parallel
    alike = 1 if any(group.ranks != parallel.dp for group in schedule.groups) else parallel.of_instance // parallel.dp
    return [
        [_RankBill(schedule, workload, pp_rank, rank).bill() for rank in range(0, parallel.of_instance, alike)]
        for pp_rank in range(parallel.pp)
    ]


def publish_passes(group: Group, workload: Workload) -> float:
    """Bytes that publishing moves in host memory for each byte of a shard. A copy from the device writes each byte. A
    shard that rests in host memory is read first. The parameters of the host's optimizer are read in fp32."""
    if workload.optimizer.on_host and group.states_rest is None:
        return 1 + ITEM_BYTES / ITEMS[members_of(group, workload).dtype]
    return 2 if group.shard_rests == "host" else 1


class _RankBill:
    """The rows of one rank. ``rank`` is its number among the ranks of its pipeline rank."""

    def __init__(self, schedule: Schedule, workload: Workload, pp_rank: int, rank: int):
        self.schedule, self.workload, self.pp_rank, self.rank = schedule, workload, pp_rank, rank
        self.settings, self.slots = workload.optimizer, schedule.step_slots
        self.rollback_left = schedule.rollback_bytes

    def bill(self) -> MovedBytes:
        rows = [*self._gathers(), *self._published()]
        for group in reversed(self.schedule.groups):  # as a backward reduces them
            if group.pp_rank == self.pp_rank:
                rows += [*self._gradients(group), *(self._host_step(group) if self._on_host(group) else ())]
                if group.shard_rests == "host" and not self.settings.on_host:
                    rows.append(("shard", "to_host", sum(self._parts(group)) * self._item(group)))
        return add_up(rows)

    def _parts(self, group: Group) -> list[int]:
        """For each parameter that the rank has a part of, the number of elements of the part."""
        apart = self.workload.parallel.of_instance // group.ranks  # consecutive ranks with the same index of shard
        return shard_parts(members_of(group, self.workload).numels, group.ranks)[self.rank // apart]

    def _item(self, group: Group) -> int:
        return ITEMS[members_of(group, self.workload).dtype]

    def _on_host(self, group: Group) -> bool:
        return self.settings.on_host and group.states_rest != "device"

    def _gathers(self) -> Iterator[Row]:
        groups, rank = self.schedule.groups, self.schedule.ranks[self.pp_rank]
        for entry in rank.entries:
            for action in entry.stage_in:
                yield "gather", "drive_read", -(-groups[action.group].bytes // SECTOR_BYTES) * SECTOR_BYTES
            for action in entry.unshard:
                size, ranks, kind = groups[action.group].bytes, groups[action.group].ranks, kind_of(action.route)
                yield "gather", "network", kind.network_bytes(size, ranks)
                yield "gather", "to_device", kind.host_link_bytes(size, ranks)

    def _published(self) -> Iterator[Row]:
        for entry in self.schedule.publish:
            group = self.schedule.groups[entry.group]
            if group.pp_rank != self.pp_rank:
                continue
            own, nodes = group.bytes // group.ranks, nodes_spanned(self.workload.parallel, self.pp_rank, group.ranks)
            if self.settings.on_host and group.states_rest is None:  # from the host's optimizer, which has fp32 copies
                yield "publish", "host_memory", sum(self._parts(group)) * ITEM_BYTES + own
            elif group.shard_rests != "host":
                yield "publish", "to_host", own
            elif ON_HOST in entry.to:
                yield "publish", "host_memory", 2 * own
            yield "publish", "network", (nodes - 1) * own
            if ON_DRIVE in entry.to:
                yield "publish", "drive_write", nodes * own

    def _gradients(self, group: Group) -> Iterator[Row]:
        """Reduces, and the copies and additions of gradients that rest in host memory."""
        whole, visits = gradient_bytes(group, self.workload), group.reduces(self.workload.parallel.num_microbatches)
        yield "gradient", "network", visits * reduced_bytes(whole, group.ranks, self.workload.parallel.instances)
        if group.gradients == "host":
            yield "gradient", "to_host", visits * (whole // group.ranks)
            yield "host_add", "host_memory", visits * ADD_PASSES * (whole // group.ranks)
            if not self.settings.on_host:
                yield "gradient", "to_device", sum(self._parts(group)) * self.settings.gradient_item_bytes

    def _host_step(self, group: Group) -> Iterator[Row]:
        numel, item, gradient = sum(self._parts(group)), self._item(group), self.settings.gradient_item_bytes
        may_be_early = self.rollback_left is not None and can_step_early(group, self.workload)
        early = may_be_early and self._saves_states(group)
        through_slots = self.slots is not None and group.states_rest is None
        in_rooms = not self.settings.delayed and (through_slots or may_be_early or group.states_rest == "nvme")
        cast_on_device = self.slots is not None and self.slots.cast == "device" and through_slots
        narrow = gradient < ITEM_BYTES and through_slots and not cast_on_device
        if group.gradients == "host":
            copied = early or not in_rooms or gradient < ITEM_BYTES
            yield "step", "host_memory", numel * (gradient + ITEM_BYTES) if copied else 0
        else:
            yield "gradient", "to_host", numel * (gradient if narrow else ITEM_BYTES)
            yield "step", "host_memory", numel * (gradient + ITEM_BYTES) if narrow else 0
        states = self.settings.main_item_bytes("float32") + self.settings.state_item_bytes
        on_host = group.shard_rests == "host"
        cast = item if not cast_on_device and (on_host or item < ITEM_BYTES) else 0
        yield "step", "host_memory", numel * (ITEM_BYTES + 2 * states + cast)
        if cast_on_device or not on_host:
            yield "shard", "to_device", numel * (ITEM_BYTES if cast_on_device else item)
            yield "shard", "to_host", numel * item if on_host else 0
        elif self.settings.delayed:
            yield "shard", "host_memory", 2 * numel * item
        yield from self._states(group, early)

    def _saves_states(self, group: Group) -> bool:
        """Take memory for a copy of the group's states before the step. Returns whether enough was left."""
        assert self.rollback_left is not None
        tensors = 1 + len(self.settings.moment_dtypes)
        parts = self._parts(group) if group.states_rest is None else []
        saved = sum(tensors * tensor_bytes(numel) + LINE_BYTES for numel in parts)
        fits = saved <= self.rollback_left
        self.rollback_left -= saved if fits else 0
        return fits

    def _states(self, group: Group, early: bool) -> Iterator[Row]:
        moments = len(self.settings.moment_dtypes)
        if group.states_rest == "nvme":
            size = sum(region_bytes(numel, moments) for numel in self._parts(group))
            yield "states", "drive_read", size
            yield "states", "drive_write", size
        elif early:
            yield "states", "host_memory", 2 * sum(self._parts(group)) * (1 + moments) * ITEM_BYTES
