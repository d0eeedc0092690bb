"""Routes: how a whole group reaches the device.

A route is ``prepare`` (once, before the first step), ``issue(group) -> handle`` and
``handle.wait()``. Issuing never blocks; waiting returns when the bytes are there for the
compute that follows (on CUDA: it makes the compute stream wait, not the host).
"""

from time import perf_counter_ns

import torch
import torch.distributed as dist

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.worker import Transfer, Worker


class GpuRoute:
    """All-gather of the ranks' shards over ``process_group``, in place.

    Collectives are issued by the training thread alone, in schedule order, which is the same
    on all ranks of the process group.
    """

    name = "gpu"

    def __init__(self, process_group):
        self.process_group = process_group

    def issue(self, group: Group):
        return dist.all_gather_into_tensor(group.whole, group.shard, group=self.process_group, async_op=True)


class CpuRoute:
    """Host-to-device copy of the whole group from the node's host copy."""

    name = "cpu"

    def __init__(self, pool: HostPool, device, clock: Clock, faults: Faults, recorder=None):
        self.pool, self.device, self.clock, self.faults, self.recorder = pool, device, clock, faults, recorder
        self.worker = Worker("cpu-route")
        self.stream = device.copy_stream()
        self._delay = faults.delayer(faults.copy_delay_ms, salt=17 + pool.rank)
        for copy in pool.copies.values():
            device.pin(copy)

    def issue(self, group: Group) -> Transfer:
        version, after = self.clock.version, self.device.mark()

        def copy(transfer: Transfer) -> None:
            if not self.faults.no_wait:
                self.pool.wait_published(group, version)
            if self._delay is not None:
                self._delay()
            start = perf_counter_ns() if self.recorder is not None else 0
            with torch.no_grad():
                transfer.after = self.device.copy(group.whole, self.pool.copies[group.index], self.stream, after)
            if self.recorder is not None:
                self.recorder.add("cpu", f"unshard {group.index}", start, perf_counter_ns())

        return self.worker.submit(copy)

    def close(self) -> None:
        self.worker.close()
        for copy in self.pool.copies.values():
            self.device.unpin(copy)


class Publisher:
    """Writes fresh shards into the node's host copy, in the schedule's order, on a thread of
    its own: the direction from the device is not the direction of the cpu route."""

    def __init__(self, pool: HostPool, groups: list[Group], device, clock: Clock, faults: Faults, recorder=None):
        self.pool, self.groups, self.device, self.clock, self.recorder = pool, groups, device, clock, recorder
        self.faults = faults
        self.worker = Worker("publisher")
        self.stream = device.copy_stream()
        self._delay = faults.delayer(faults.publish_delay_ms, salt=31 + pool.rank)
        self._last: Transfer | None = None

    def publish(self, iterations: int) -> None:
        """Issue the write of every group's shard at the clock's version; returns at once.

        ``iterations``: training iterations that have ended on this rank. What they read is
        overwritten only when every rank of the node has ended as many.
        """
        version, after = self.clock.version, self.device.mark()

        def write(transfer: Transfer) -> None:
            self.pool.wait_reads_done(iterations)
            for group in self.groups:
                start = perf_counter_ns() if self.recorder is not None else 0
                if self._delay is not None:
                    self._delay()
                if group.index != self.faults.stale_group or version <= 2:
                    with torch.no_grad():
                        own = self.pool.slice_of(group, self.pool.rank)
                        event = self.device.copy(own, group.shard, self.stream, after)
                    self.device.synchronize(event)
                self.pool.set_published(group, version)
                if self.recorder is not None:
                    self.recorder.add("publish", f"publish {group.index}", start, perf_counter_ns())

        self._last = self.worker.submit(write)

    def wait(self) -> None:
        """Block until everything issued has been written; the shards may change after that."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def close(self) -> None:
        self.worker.close()
