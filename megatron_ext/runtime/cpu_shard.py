"""Route ``cpu_shard``: the own shard from host memory, then an all-gather.

Each rank copies 1/DP of the group over its own PCIe link, and the all-gather does the rest. The shard is the one that
rests in host memory, so nothing is published for this route.
Source: bandwidth-centric partitioning of ZeRO-Infinity (Rajbhandari et al., SC 2021).

Large groups come in pieces (:func:`megatron_ext.workload.route.shard_pieces`): one is gathered while the next is
copied, and the next group is copied beside this one's last all-gather. The route has a process group of its own.
On CPU one thread copies and one gathers; on CUDA the training thread issues both, on two streams, as NCCL wants one
order over all communicators.
"""

from functools import partial
from time import perf_counter_ns

import torch
import torch.distributed as dist

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.node_groups import high_priority
from megatron_ext.runtime.worker import Transfer, Worker
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.route import shard_pieces


def make_data_group(parallel: Parallel, backend: str, **how):
    """A process group of this rank's data-parallel ranks for this route alone; called by all ranks of the run. ``how``:
    further arguments of ``dist.new_group``."""
    own = None
    for pp_rank in range(parallel.pp):
        for tp_rank in range(parallel.tensor_model_parallel_size):
            ranks = [parallel.global_rank(pp_rank, dp_rank, tp_rank) for dp_rank in range(parallel.dp)]
            group = dist.new_group(ranks, backend=backend, **(high_priority(backend) | how))
            if dist.get_rank() in ranks:
                own = group
    assert own is not None
    return own


class ShardGather:
    """Copies shards into whole groups and gathers them; one instance a rank.

    Args:
        process_group: used by nobody else.
        device: see :mod:`megatron_ext.runtime.device`.
        delay: called before each copy, or None.
    """

    def __init__(self, process_group, device, delay=None):
        self.process_group, self.device, self._delay = process_group, device, delay
        self.stream, self._copies = device.copy_stream(), device.copy_stream()
        self.copier = Worker("cpu-shard-copies") if self.stream is None else None
        self.gatherer = Worker("cpu-shard-gathers") if self.stream is None else None
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def issue(self, whole: torch.Tensor, start: int, shard: torch.Tensor, done=None) -> Transfer:
        """Fill ``whole`` (1D) from all ranks' shards; returns at once. ``shard`` lies in host memory and belongs at
        element ``start``. ``done(lane, start_ns, end_ns)`` is called for every copy and all-gather, on CPU."""
        pieces = shard_pieces(whole.numel() * whole.element_size())
        ends = [shard.numel() * number // pieces for number in range(pieces + 1)]
        parts = list(zip(ends, ends[1:]))
        copier, gatherer = self.copier, self.gatherer
        if copier is None or gatherer is None:
            return self._issue_on_streams(whole, start, shard, parts)

        def copy(begin: int, end: int) -> Transfer:
            def run(transfer: Transfer) -> None:
                if begin == 0 and self._delay is not None:
                    self._delay()
                before = perf_counter_ns()
                _copy(whole, start, shard, begin, end)
                if done is not None:
                    done("cpu", before, perf_counter_ns())

            return copier.submit(run)

        copied = [copy(begin, end) for begin, end in parts]

        def gather(transfer: Transfer) -> None:
            for part, (begin, end) in zip(copied, parts):
                part.wait()
                before = perf_counter_ns()
                self._gather(whole, start, shard.numel(), begin, end)
                if done is not None:
                    done("gpu", before, perf_counter_ns())

        return gatherer.submit(gather)

    def _issue_on_streams(self, whole, start: int, shard, parts) -> Transfer:
        after, transfer = self.device.mark(), Transfer()
        for begin, end in parts:
            copied = self.device.on_stream(partial(_copy, whole, start, shard, begin, end), self._copies, after)
            gather = partial(self._gather, whole, start, shard.numel(), begin, end)
            transfer.after = self.device.on_stream(gather, self.stream, copied.event)
            after = None  # the copies' stream has waited
        transfer.finish()
        return transfer

    @torch.no_grad()
    def _gather(self, whole: torch.Tensor, start: int, numel: int, begin: int, end: int) -> None:
        """All-gather elements ``begin`` to ``end`` of every rank's shard, which has ``numel``."""
        own = whole[start + begin : start + end]
        if end - begin == numel:
            dist.all_gather_into_tensor(whole, own, group=self.process_group)
            return
        ranks = whole.numel() // numel
        most = -(-numel // shard_pieces(whole.numel() * whole.element_size())) * ranks
        buffer = self._buffers.get(whole.dtype)
        if buffer is None or buffer.numel() < most:
            buffer = self._buffers[whole.dtype] = torch.empty(most, dtype=whole.dtype, device=whole.device)
        piece = buffer[: (end - begin) * ranks]
        dist.all_gather_into_tensor(piece, own, group=self.process_group)
        whole.view(ranks, numel)[:, begin:end].copy_(piece.view(ranks, end - begin))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that pieces are gathered in."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def close(self) -> None:
        for worker in (self.copier, self.gatherer):
            if worker is not None:
                worker.close()


@torch.no_grad()
def _copy(whole: torch.Tensor, start: int, shard: torch.Tensor, begin: int, end: int) -> None:
    whole[start + begin : start + end].copy_(shard[begin:end], non_blocking=True)


class CpuShardRoute:
    """The route of groups whose shards rest in host memory."""

    name = "cpu_shard"

    def __init__(self, process_group, device, faults: Faults, recorder=None):
        delay = faults.delayer(faults.copy_delay_ms, salt=59 + dist.get_rank(process_group))
        self.gather, self.recorder = ShardGather(process_group, device, delay), recorder
        self._stale, self._first = faults.stale_group, None

    def issue(self, group: Group) -> Transfer:
        done, shard = None, group.shard
        if group.index == self._stale:
            shard = self._first = shard.clone() if self._first is None else self._first
        if self.recorder is not None and self.gather.copier is not None:
            recorder, name = self.recorder, f"unshard {group.index}"
            done = lambda lane, start, end: recorder.add(lane, name, start, end)
        return self.gather.issue(group.whole, group.shard_start, shard, done)

    @property
    def buffer_bytes(self) -> int:
        return self.gather.buffer_bytes

    def close(self) -> None:
        self.gather.close()
