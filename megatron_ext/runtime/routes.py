"""Routes: how a whole group reaches the device.

Issuing never blocks. Waiting returns when the bytes are there for the compute that follows.

On CUDA ``wait`` makes the compute stream wait and not the host. Only where the device has no flags for streams (see
stream_flags.py) does ``wait`` of the ``cpu`` and ``nvme`` routes do both: it blocks the host until the route's thread
has issued the copy, then makes the compute stream wait for the copy's end.

[Note: One order over all communicators]
NCCL wants the collectives of all communicators in one order on all ranks that share them. A rank has several: the
data-parallel one of the ``gpu`` route and of gradients, those of the hierarchical all-gather (two), of ``cpu_shard``,
and Megatron's for tensor and pipeline parallelism. On CUDA the training thread issues every one of them, when the
program says so: no worker calls a collective of the device. All data-parallel ranks run the same program, compiled from
one file (they compare its sha256) for their pipeline rank, and Megatron's steps, between which it issues, are the same
on them. So the order is the same; nothing in it depends on what has arrived. The debug mode (debug.py) counts all of
them and compares the order after every iteration. On CPU the communicators of worker threads are used by nobody else,
and gloo has no order between process groups.
"""

from time import perf_counter_ns
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.lanes import Handle, open_lane
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.worker import LATER, Transfer, Waitable, Worker


class Route(Protocol):
    """Brings groups onto the device, see the note above."""

    def issue(self, group: Group) -> Waitable: ...


class GpuRoute:
    """All-gather of the ranks' shards over ``process_group``, in place. A shard that rests in host memory is
    copied to its place in the whole group first.

    Collectives are issued by the training thread alone, in schedule order, which is the same
    on all ranks of the process group.
    """

    name = "gpu"

    def __init__(self, process_group):
        self.process_group = process_group

    def issue(self, group: Group):
        shard = group.shard
        if group.on_host:
            shard = group.whole.narrow(0, group.shard_start, shard.numel())
            with torch.no_grad():
                shard.copy_(group.shard, non_blocking=True)
        work = dist.all_gather_into_tensor(group.whole, shard, group=self.process_group, async_op=True)
        assert work is not None  # async_op
        return work


class CpuRoute:
    """Host-to-device copy of the whole group from the node's host copy, which is page-locked."""

    name = "cpu"

    def __init__(self, pool: HostPool, device, clock: Clock, faults: Faults, recorder=None):
        self.pool, self.clock, self.faults, self.recorder = pool, clock, faults, recorder
        self.lane = open_lane("cpu-route", device)
        self._delay = faults.delayer(faults.copy_delay_ms, salt=17 + pool.rank)
        self._waited: dict[int, int] = {}  # version that the lane has waited for, by group

    def issue(self, group: Group) -> Handle:
        version = self.clock.version

        def copy(lane, after):
            if not self.faults.no_wait and self._waited.get(group.index) != version:
                self.pool.wait_published(group, version, lane.flag_stream)
                self._waited[group.index] = version
            lane.delay(self._delay)
            return _copy(lane, group, self.pool.copies[group.index], after, self.recorder)

        return self.lane.submit(copy)

    def close(self) -> None:
        self.lane.close()


def _copy(lane, group: Group, source: torch.Tensor, after, recorder: Recorder | None):
    marks = [] if recorder is not None else None
    copied = lane.copy(group.whole, source, after, marks)
    if recorder is not None and marks is not None:
        recorder.add("cpu", f"unshard {group.index}", *marks)
    return copied


class NvmeRoute:
    """From the node's NVMe copy through a staging slot onto the device.

    ``stage_in`` begins the read into a slot, ``issue`` the copy out of it. A slot is filled
    anew only when the copy out of it has ended. Reads go to the drive without waiting for those
    before them; in the trace each begins where the one before ended.
    """

    name = "nvme"

    def __init__(
        self, pool: NvmePool, flags: HostPool, device, clock: Clock, faults: Faults, slots: int, recorder=None
    ):
        self.pool, self.flags, self.device, self.clock, self.faults, self.recorder = (
            pool,
            flags,
            device,
            clock,
            faults,
            recorder,
        )
        self.reader, self.lane = Worker("nvme-read"), open_lane("nvme-copy", device)
        self._delay = faults.delayer(faults.read_delay_ms, salt=43 + flags.rank)
        self._copied_out: list[Handle | None] = [None] * slots
        self._reads = [0] * slots  # begun so far
        self._staged: dict[int, tuple[int, Transfer]] = {}
        self._read_end = 0

    def stage_in(self, group: Group, slot: int) -> None:
        """Begin to read ``group`` into ``slot`` at the clock's version; returns at once."""
        version, previous = self.clock.version, self._copied_out[slot]
        self._reads[slot] += 1
        number = self._reads[slot]

        def read(transfer: Transfer):
            if previous is not None:
                previous.finished(self.device)
            if not self.faults.no_wait:
                self.flags.wait_published(group, version)
            if self._delay is not None:
                self._delay()
            if group.index == self.faults.short_read and version > 2:
                self.pool.cut_short(group)
            start = perf_counter_ns() if self.recorder is not None else 0

            def before_end() -> None:
                if self.recorder is not None:
                    end = perf_counter_ns()
                    self.recorder.add("nvme", f"stage_in {group.index}", max(start, min(self._read_end, end)), end)
                    self._read_end = end
                self.pool.set_staged(slot, number)

            self.pool.start(group, slot, transfer, before_end)
            return LATER

        self._staged[group.index] = (slot, self.reader.submit(read))

    def issue(self, group: Group) -> Handle:
        slot, staged = self._staged.pop(group.index)
        number = self._reads[slot]

        def copy(lane, after):
            if lane.flag_stream is None:
                staged.wait()
            else:
                self.pool.wait_staged(slot, number, lane.flag_stream)
            return _copy(lane, group, self.pool.staged(group, slot), after, self.recorder)

        handle = self._copied_out[slot] = self.lane.submit(copy)
        return handle

    def drop(self) -> None:
        """Empty the slots; waits for reads that nobody has taken."""
        while self._staged:
            self._staged.popitem()[1][1].wait()

    def close(self) -> None:
        self.reader.close()
        self.lane.close()
