"""Write fresh shards to the node's copies after the optimizer step, beside the next forwards.

Where a data-parallel group spans nodes, a second thread waits for what the other nodes send, while the first already
sends the next group (see the note in node_exchange.py).

[Note: What the device publishes by itself]
Where the device's streams store flags (see stream_flags.py), a shard that goes from the device to the host copy of its
own node is queued ahead: the copy, then its flag. A drive, another node, or a shard that rests in host memory need the
host's processor: there the copy is queued ahead, too, and a thread that waits for its end does the rest.
"""

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import NamedTuple

import torch

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.lanes import Handle
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


class _Shard(NamedTuple):
    """A shard to write, and its place in host memory.

    Attributes:
        pieces: of the host's optimizer, which the shard is made of; None: it is copied.
        passing: number of its use of the passing buffers; None where it lies in the host copy or already on the host.
        copied: end of its copy, queued on the stream; None: the thread copies it.
        stale: the fault that leaves the copy as it is.
    """

    target: Target
    own: torch.Tensor
    pieces: list | None
    passing: int | None
    copied: Handle | None = None
    stale: bool = False


class Publisher:
    """Writes shards in the schedule's order, on a thread or a stream of its own: the direction from the
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
        self._copied: Handle | None = None  # end of the last copy that is queued
        self._version = 0  # that was published last
        unhosted = [target.group.shard for target in targets if not target.host]
        size = max((shard.numel() * shard.element_size() for shard in unhosted), default=0)
        # Copies on the drive alone pass through these one after another: as many as may be on their way.
        self._passing = [device.host_tensor(size, torch.uint8) for _ in range(IN_FLIGHT if size else 0)]
        self._passed = 0

    def publish(self, iterations: int, from_shards: bool = False) -> None:
        """Issue the write of every group's shard at the clock's version; returns at once.

        ``from_shards``: the shards have values that the host's optimizer does not know.

        ``iterations``: training iterations that have ended on this rank. What they read is
        overwritten only when every rank of the node has ended as many.
        """
        version, after = self.clock.version, self.device.mark()
        by_thread: Iterable[_Shard]
        if self.device.flags is None:
            by_thread = (self._place(target, version, from_shards) for target in self.targets)  # placed by the thread
        else:
            by_thread = self._queue_all(iterations, version, after, from_shards)
            if not by_thread:
                return

        def write(transfer: Transfer) -> None:
            try:
                self.pool.wait_reads_done(iterations)
                self._write_all(by_thread, version, after)
            except BaseException as error:  # readers wait for flags, not for this thread
                self.pool.fail(error)
                raise

        self._last = self.worker.submit(write)

    def _place(self, target: Target, version: int, from_shards: bool) -> _Shard:
        """Where the own shard of ``target`` goes in host memory."""
        group, passing = target.group, None
        pieces = target.offloaded() if target.offloaded is not None and not from_shards else None
        if target.host:
            own = self.pool.slice_of(group, self.dp_rank)
        elif pieces is None and (self.device.kind == "cpu" or group.on_host):
            own = group.shard
        else:
            passing, self._passed = self._passed, self._passed + 1
            size = group.shard.numel() * group.shard.element_size()
            own = self._passing[passing % IN_FLIGHT][:size].view(group.shard.dtype)
        stale = group.index == self.faults.stale_group and version > 2
        return _Shard(target, own, pieces, passing, stale=stale)

    def _queue_all(self, iterations: int, version: int, after, from_shards: bool) -> list[_Shard]:
        """Queue the copies of shards on the stream, and the flags of those that need no more; returns the others."""
        self.pool.wait_reads_done(iterations, self.stream)
        by_thread = []
        for target in self.targets:
            shard, marks = self._place(target, version, from_shards), [] if self.recorder is not None else None
            if self._delay is not None:
                self._delay(lambda seconds: self.device.sleep(self.stream, seconds))
            if shard.pieces is None and not target.group.on_host and not shard.stale:
                if shard.passing is not None:
                    assert self.nvme is not None  # what has no host copy goes to the drive
                    buffer, uses = shard.passing % IN_FLIGHT, shard.passing // IN_FLIGHT
                    self.nvme.wait_passed(buffer, uses, self.stream)
                if target.host:  # the thread may still write or send what lies there
                    self.pool.wait_own(target.group, self._version, self.stream)
                copied = self._copied = self.device.copy(shard.own, target.group.shard, self.stream, after, marks)
                shard = shard._replace(copied=copied)
            if target.nvme or self.arrivals is not None or (shard.copied is None and not shard.stale):
                by_thread.append(shard)
                continue
            self.pool.set_published(target.group, version, self.stream)
            if self.recorder is not None and marks:
                self.recorder.add("publish", f"publish {target.group.index}", *marks)
        self._version = version
        return by_thread

    def _write_all(self, shards: Iterable[_Shard], version: int, after) -> None:
        """On the thread: bring every shard to host memory, exchange it, write it, and store its flag."""
        begun: deque[Transfer] = deque()
        last_ns = 0

        def end(shard: _Shard, arriving: Arriving | None, start: int) -> None:
            nonlocal last_ns
            if arriving is not None:
                with torch.no_grad():
                    self._end(shard.target, arriving)
            self.pool.set_published(shard.target.group, version)
            if shard.passing is not None and self.nvme is not None:
                self.nvme.set_passed(shard.passing % IN_FLIGHT, shard.passing // IN_FLIGHT + 1)
            if self.recorder is not None:  # groups follow each other, also where two are on their way
                start, last_ns = max(start, last_ns), perf_counter_ns()
                self.recorder.add("publish", f"publish {shard.target.group.index}", start, last_ns)

        for shard in shards:
            if len(begun) == IN_FLIGHT:
                begun.popleft().wait()
            start, arriving = perf_counter_ns(), None
            if self._delay is not None and self.device.flags is None:
                self._delay()
            if not shard.stale:
                with torch.no_grad():
                    self._bring(shard, after)
                    arriving = self.nodes.begin(self._places(shard), self.dp_rank)
            if self.arrivals is None:
                end(shard, arriving, start)
            else:
                begun.append(self.arrivals.submit(lambda transfer, known=(shard, arriving, start): end(*known)))
        for transfer in begun:
            transfer.wait()

    def _bring(self, shard: _Shard, after) -> None:
        """The shard lies in its place in host memory when this returns."""
        group, own = shard.target.group, shard.own
        if shard.copied is not None:
            shard.copied.finished(self.device)
        elif shard.pieces is not None:
            if shard.passing is not None:
                own.zero_()  # what pieces leave out is padding
            for start, copy in shard.pieces:  # fp32 on the host; rounded here as on the device
                own[start : start + copy.numel()].copy_(copy)
        elif group.on_host and own is not group.shard:
            own.copy_(group.shard)  # by no stream: in a single hardware queue it could lie behind a wait for its flag
        elif own is not group.shard:
            self.device.synchronize(self.device.copy(own, group.shard, self.stream, after))

    def _places(self, shard: _Shard) -> list[torch.Tensor]:
        """Where the shard is, and where those of the counterparts are to come: straight into the host copy."""
        ranks = self.nodes.dp_ranks
        if shard.target.host and ranks:
            return [self.pool.slice_of(shard.target.group, dp_rank) for dp_rank in ranks]
        return self.nodes.places(shard.own, self.dp_rank)

    def _end(self, target: Target, arriving: Arriving) -> None:
        """Wait for what the counterparts on other nodes have sent; write it on the drive where the group has a copy."""
        group = target.group
        for dp_rank, shard in arriving.wait():
            if target.nvme and self.nvme is not None:
                self.nvme.write(group, dp_rank, shard)
        if target.nvme and self.nvme is not None:
            self.nvme.flush(group)

    def wait(self) -> None:
        """Wait until the shards may change. Blocks the calling thread until all issued writes have ended; where copies
        of shards are queued on a stream, the current stream waits for them instead. Any thread may call it."""
        if self._copied is not None:
            self._copied.wait()
        last = self._last
        if last is not None and (self.device.flags is None or self._reads_host_shards()):
            last.wait()

    def _reads_host_shards(self) -> bool:
        return any(target.offloaded is not None or target.group.on_host for target in self.targets)

    def end_reads(self, iterations: int, settle: bool = False) -> None:
        """Tell the other ranks that ``iterations`` have ended here: they may overwrite what these read.

        ``settle``: wait for the device, where no reduce lies between, see [Note: Reads that are queued].
        """
        if self.device.flags is not None:
            self.pool.set_reads_done(iterations, self.device.current_stream())
            return
        if settle:
            self.device.settle()
        self.pool.set_reads_done(iterations)

    def close(self) -> None:
        """End the threads once writes in flight have ended: their files and memory are released next."""
        self.worker.close()
        if self.arrivals is not None:
            self.arrivals.close()
