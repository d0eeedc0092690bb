"""Writes fresh shards to the node's copies after the optimizer step, during the next forwards.

[Note: Streams and threads]
For a shard that goes from the device to the host copy of its own node, everything is queued: the copy, then its flag.
A drive, another node, or a shard that the host's optimizer holds need the CPU. There a thread polls the flag of the
copy, does its work, and stores the flag that others wait for. If a data-parallel group spans nodes, a second thread
waits for the shards of the other nodes, while the first already sends the next group (see the note in
node_exchange.py).
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

import torch

from megatron_ext.runtime.flags import DeviceFlag, poll, private_flags
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import DRIVE
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.node_exchange import IN_FLIGHT, Arriving, NodeExchange
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.recorder import log_of
from megatron_ext.runtime.worker import LATER, Transfer, Worker


class Target(NamedTuple):
    """A group and the copies that its shards are written to; ``nodes`` is the exchange with the other nodes that share
    them, if any.

    ``offloaded``, if the optimizer steps on the host, gives ``(start, host tensor)`` of every piece of
    the shard.
    """

    group: RankGroup
    host: bool
    nvme: bool
    offloaded: Callable | None = None
    nodes: NodeExchange | None = None


def by_thread(targets: list[Target]) -> set[int]:
    """Indices of the groups whose host copy is written by threads: their shards come from host memory, or from other
    nodes."""
    return {t.group.index for t in targets if t.offloaded is not None or t.group.on_host or t.nodes is not None}


class _Shard(NamedTuple):
    """A shard on its way through host memory.

    Attributes:
        own: where the shard is placed there.
        pieces: tensors of the host's optimizer that make up the shard; None: the shard is copied.
        copied: value of the target's flag after a stream has copied the shard, or has written it in host memory; None:
            no stream is involved.
        bounce: whether ``own`` is a bounce buffer.
    """

    number: int
    target: Target
    own: torch.Tensor
    pieces: list | None
    copied: int | None
    bounce: bool = False


class Publisher(Part):
    """Writes shards in the schedule's order.

    Args:
        targets: published groups of this rank, in the order in which they are written.
    """

    def __init__(self, targets: list[Target], copies: NodeCopies):
        self.targets = targets
        self.pool, self.nvme, self.device, self.issuer, self.clock, self.recorder = copies
        across = any(target.nodes is not None for target in targets)
        self.worker, self.arrivals = Worker("publisher"), Worker("publisher-arrivals") if across else None
        self.stream = self.device.stream("publish")
        self.stream.log = log_of(self.recorder, "publish", "to_host", "publish")
        self.copied = self.device.event()
        """After the last queued copy of a shard on the device."""
        self._taken, self._flags = self.device.event(), private_flags(len(targets), self.device)
        self._jobs: list[Transfer] = []
        self._published = 0
        unhosted = [target.group.shard for target in targets if not target.host]
        size = max((shard.numel() * shard.element_size() for shard in unhosted), default=0)
        # Shards that are copied only to the drive pass through these buffers, one after another.
        self._bounce = [self.device.host_tensor(size, torch.uint8) for _ in range(IN_FLIGHT if size else 0)]
        self._bounced: deque[Transfer] = deque([], maxlen=IN_FLIGHT)
        self._sent: deque[Transfer] = deque()  # exchanges in flight; used by the thread
        self._bounces = self._last_ns = 0

    def updated(self, iterations: int, by_optimizer: bool) -> None:
        """Issue the write of every group's shard at the clock's version, after :meth:`settled` for the previous
        version. What ``iterations`` have read is overwritten only when every rank of the node has ended as many."""
        assert all(job.ended for job in self._jobs)
        self._jobs = []  # only here: a thread that has not looked yet must also find jobs that have ended
        self._published += 1
        version, stream = self.clock.version, self.stream
        stream.wait(self.device.compute.record(self._taken))
        for flag in self.pool.reads_done:
            stream.wait_flag(flag, iterations, partial(self.pool.check_reads_done, iterations))
        for number, target in enumerate(self.targets):
            shard, before = self._place(number, target, not by_optimizer), None
            self._count(shard)
            if target.nvme or self.pool.by_thread(target.group):
                job = self.worker.submit(partial(self._write, shard, version, iterations))
                self._jobs.append(job)
                if shard.bounce:
                    before = self._bounced[0] if len(self._bounced) == IN_FLIGHT else None
                    self._bounced.append(job)
            if shard.copied is not None:
                self.issuer.when(
                    lambda before=before: before is None or before.ended, partial(self._copy, shard, version)
                )

    def _place(self, number: int, target: Target, from_shards: bool) -> _Shard:
        """Where this rank's shard of ``target`` is placed in host memory."""
        group = target.group
        pieces = target.offloaded() if target.offloaded is not None and not from_shards else None
        copied = self._published if pieces is None else None
        if target.host:
            own = self.pool.slice_of(group, group.dp_rank)
        elif group.on_host and pieces is None:
            own = group.shard
        else:
            own = self._bounce[self._bounces % IN_FLIGHT][: group.shard.nbytes].view(group.shard.dtype)
            self._bounces += 1
            return _Shard(number, target, own, pieces, copied, bounce=True)
        return _Shard(number, target, own, pieces, copied)

    def _count(self, shard: _Shard) -> None:
        """Count the bytes of a shard that a thread moves; the stream counts the copy from the device."""
        recorder, own, target = self.recorder, shard.own, shard.target
        if not recorder.counts:
            return
        nodes = 1 if target.nodes is None else len(target.nodes.dp_ranks)
        if shard.pieces is not None:
            recorder.moved("publish", "host_memory", sum(copy.nbytes for _, copy in shard.pieces) + own.nbytes)
        elif target.group.on_host and own is not target.group.shard:
            recorder.moved("publish", "host_memory", 2 * own.nbytes)
        recorder.moved("publish", "network", (nodes - 1) * own.nbytes)
        recorder.moved("publish", "drive_write", nodes * own.nbytes if target.nvme else 0)

    def _copy(self, shard: _Shard, version: int) -> None:
        """Queue the copy of a shard on the device, followed by its flags."""
        stream, target = self.stream, shard.target
        by_thread = target.nvme or self.pool.by_thread(target.group)
        if not target.group.on_host:
            stream.copy(shard.own, target.group.shard, None if by_thread else f"publish {target.group.index}")
        if by_thread:
            stream.store(self._flags[shard.number], self._published)
        if target.host and not self.pool.by_thread(target.group):
            flag = self.pool.own_flag(target.group)
            assert isinstance(flag, DeviceFlag)
            stream.store(flag, version)
        stream.record(self.copied)

    # On the thread.

    def _write(self, shard: _Shard, version: int, iterations: int, transfer: Transfer):
        """Bring a shard to host memory, send it, write it, and store its flags."""
        try:
            start, arriving = perf_counter_ns(), None
            if len(self._sent) == IN_FLIGHT:
                self._sent.popleft().wait()
            self._bring(shard, iterations)
            if (nodes := shard.target.nodes) is not None:
                with torch.no_grad():
                    arriving = nodes.begin(self._places(shard, nodes), shard.target.group.dp_rank)
            end = partial(self._end, shard, arriving, version, start)
            if self.arrivals is None:
                end()
            else:
                self._sent.append(self.arrivals.submit(partial(self._end_of_job, end, transfer)))
                return LATER
        except BaseException as error:  # readers wait for flags, not for this thread
            self.pool.fail(error)
            raise

    def _end_of_job(self, end: Callable[[], None], job: Transfer, transfer: Transfer) -> None:
        try:
            end()
            job.finish()
        except BaseException as error:
            self.pool.fail(error)
            job.finish(error)
            raise

    def _bring(self, shard: _Shard, iterations: int) -> None:
        """Wait until the shard lies in its place in host memory."""
        group, own = shard.target.group, shard.own
        if shard.copied is not None:
            poll(partial(self._flags[shard.number].reached, shard.copied))
            if not group.on_host:
                return
        for flag in self.pool.reads_done:  # for a copy, the stream has waited for these flags
            poll(partial(flag.reached, iterations), partial(self.pool.check_reads_done, iterations))
        with torch.no_grad():
            if shard.pieces is not None:
                if shard.bounce:
                    own.zero_()  # the padding between pieces
                for start, copy in shard.pieces:  # fp32 on the host; rounded here as on the device
                    own[start : start + copy.numel()].copy_(copy)
            elif own is not group.shard:
                own.copy_(group.shard)

    def _places(self, shard: _Shard, nodes: NodeExchange) -> list[torch.Tensor]:
        """Where this rank's shard is, and where those of the counterparts are received: directly in the host copy."""
        group = shard.target.group
        if shard.target.host:
            return [self.pool.slice_of(group, dp_rank) for dp_rank in nodes.dp_ranks]
        return nodes.places(shard.own, group.dp_rank)

    def _end(self, shard: _Shard, arriving: Arriving | None, version: int, start: int) -> None:
        """Wait for the shards of the counterparts on other nodes; write them to the copy on the drive, if any."""
        target, own = shard.target, [(shard.target.group.dp_rank, shard.own)]
        for dp_rank, part in own if arriving is None else arriving.wait():
            if target.nvme and self.nvme is not None:
                self.nvme.write(target.group, dp_rank, part)
        if target.host and self.pool.by_thread(target.group):
            self.pool.own_flag(target.group).store(version)
        if target.nvme and self.nvme is not None:
            self.nvme.flush(target.group)
            self.pool.own_flag(target.group, DRIVE).store(version)
        start, self._last_ns = max(start, self._last_ns), perf_counter_ns()  # no overlap, even with two in flight
        self.recorder.add("publish", f"publish {target.group.index}", start, self._last_ns)

    # When shards may change.

    def release(self, iterations: int) -> None:
        self.settled()
        self.end_reads(iterations)

    def settled(self) -> None:
        """Wait on the host for the threads, whose errors are raised, and on the compute stream for copies."""
        for job in self._jobs:
            self.issuer.join(job)
        self.device.compute.wait(self.copied)

    def wait_on_thread(self) -> None:
        """Wait, on a thread, until the tensors of the host's optimizer may change."""
        for job in self._jobs:
            job.wait()

    def end_reads(self, iterations: int) -> None:
        """Tell the other ranks that ``iterations`` have ended here, after the queued work of the compute stream. They
        may then overwrite what these iterations read."""
        for flag in self.pool.own_reads_done:
            self.device.compute.store(flag, iterations)

    def close(self) -> None:
        """End the threads when writes in flight have ended, because their files and memory are released next."""
        self.worker.close()
        if self.arrivals is not None:
            self.arrivals.close()
        self.stream.close()
