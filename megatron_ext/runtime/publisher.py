"""Write fresh shards to the node's copies after the optimizer step, beside the next forwards.

Where a data-parallel group spans nodes, a second thread writes what the other nodes sent, while the first already sends
the next group (see the note in node_exchange.py).
"""

import contextlib
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import NamedTuple

import torch

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.node_exchange import IN_FLIGHT, Arriving, NodeExchange
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.worker import Transfer, Worker


class Target(NamedTuple):
    """A group and where its shards go.

    ``offloaded``, where the optimizer steps on the host, gives ``(start, host tensor)`` of every
    piece of the shard, or None where the device has the only copy.
    """

    group: Group
    host: bool
    nvme: bool
    offloaded: Callable | None = None


class Publisher:
    """Writes shards in the schedule's order, on a thread of its own: the direction from the
    device is not the direction of the cpu route.

    Args:
        targets: published groups of this rank, in the order in which they are written.
        pool: the node's host copies and everybody's flags.
        nvme: the node's NVMe copy, or None.
        nodes: the exchange with the other nodes.
        dp_rank: this rank's index among all data-parallel ranks.
    """

    def __init__(
        self,
        targets: list[Target],
        pool: HostPool,
        nvme: NvmePool | None,
        nodes: NodeExchange,
        dp_rank: int,
        device,
        clock: Clock,
        faults: Faults,
        recorder=None,
    ):
        self.targets, self.pool, self.nvme, self.nodes, self.dp_rank = targets, pool, nvme, nodes, dp_rank
        self.device, self.clock, self.faults, self.recorder = device, clock, faults, recorder
        self.worker, self.arrivals = Worker("publisher"), Worker("publisher-arrivals") if nodes.crosses_nodes else None
        self.stream = device.copy_stream()
        self._delay = faults.delayer(faults.publish_delay_ms, salt=31 + dp_rank)
        self._last: Transfer | None = None
        unhosted = [target.group.shard for target in targets if not target.host]
        size = max((shard.numel() * shard.element_size() for shard in unhosted), default=0)
        # Copies on the drive alone pass through these one after another: as many as may be on their way.
        pinned = any(shard.device.type == "cuda" for shard in unhosted)
        self._passing = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._passed = 0

    def publish(self, iterations: int) -> None:
        """Issue the write of every group's shard at the clock's version; returns at once.

        ``iterations``: training iterations that have ended on this rank. What they read is
        overwritten only when every rank of the node has ended as many.
        """
        version, after = self.clock.version, self.device.mark()

        def write(transfer: Transfer) -> None:
            try:
                write_all()
            except BaseException as error:  # readers wait for flags, not for this thread
                self.pool.fail(error)
                raise

        def write_all() -> None:
            self.pool.wait_reads_done(iterations)
            begun: deque[Transfer] = deque()
            last_ns = 0

            def end(target: Target, arriving: Arriving | None, start: int) -> None:
                nonlocal last_ns
                if arriving is not None:
                    with torch.no_grad():
                        self._end(target, arriving)
                self.pool.set_published(target.group, version)
                if self.recorder is not None:  # groups follow each other, also where two are on their way
                    start, last_ns = max(start, last_ns), perf_counter_ns()
                    self.recorder.add("publish", f"publish {target.group.index}", start, last_ns)

            for target in self.targets:
                if len(begun) == IN_FLIGHT:
                    begun.popleft().wait()
                start, arriving = perf_counter_ns(), None
                if self._delay is not None:
                    self._delay()
                if target.group.index != self.faults.stale_group or version <= 2:
                    with torch.no_grad():
                        arriving = self.nodes.begin(self._on_host(target, after), self.dp_rank)
                if self.arrivals is None:
                    end(target, arriving, start)
                else:
                    begun.append(self.arrivals.submit(lambda transfer, known=(target, arriving, start): end(*known)))
            for transfer in begun:
                transfer.wait()

        self._last = self.worker.submit(write)

    def _end(self, target: Target, arriving: Arriving) -> None:
        """Write the own shard where it is not yet, and those that the counterparts on other nodes have sent."""
        group = target.group
        for dp_rank, shard in arriving.wait():
            if target.host and dp_rank != self.dp_rank:
                self.pool.slice_of(group, dp_rank).copy_(shard)
            if target.nvme and self.nvme is not None:
                self.nvme.write(group, dp_rank, shard)
        if target.nvme and self.nvme is not None:
            self.nvme.flush(group)

    def _on_host(self, target: Target, after) -> torch.Tensor:
        """The own shard in host memory: in the host copy where there is one."""
        group = target.group
        offloaded = target.offloaded() if target.offloaded is not None else None
        if target.host:
            own = self.pool.slice_of(group, self.dp_rank)
        elif offloaded is None and group.shard.device.type == "cpu":
            return group.shard
        else:
            own = self._next_passing(group.shard)
        if offloaded is not None:
            for start, copy in offloaded:  # fp32 on the host; rounded here as on the device
                own[start : start + copy.numel()].copy_(copy)
            return own
        self.device.synchronize(self.device.copy(own, group.shard, self.stream, after))
        return own

    def _next_passing(self, shard: torch.Tensor) -> torch.Tensor:
        """Host memory like ``shard``, zero at first: what offloaded pieces leave out is padding."""
        self._passed += 1
        buffer = self._passing[self._passed % IN_FLIGHT][: shard.numel() * shard.element_size()]
        return buffer.zero_().view(shard.dtype)

    def wait(self) -> None:
        """Block until everything issued has been written; the shards may change after that."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def close(self) -> None:
        """End the threads, not before what is being written has been: its files and memory go next."""
        if self._last is not None:
            with contextlib.suppress(Exception):  # nobody will read it; who needed it has heard of it
                self._last.wait()
        self.worker.close()
        if self.arrivals is not None:
            self.arrivals.close()
