"""Route ``cpu_shard``: the own shard from host memory, then an all-gather.

Each rank copies 1/DP of the group over its own PCIe link, and the all-gather does the rest. The shard is the one that
rests in host memory, so nothing is published for this route.
Source: bandwidth-centric partitioning of ZeRO-Infinity (Rajbhandari et al., SC 2021).

Its process group is its own. On CPU a thread runs both parts, one group after another; on CUDA the training thread
issues them, as NCCL wants one order over all communicators, on a stream of their own.
"""

from time import perf_counter_ns

import torch
import torch.distributed as dist

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.worker import Transfer, Worker
from megatron_ext.workload.parallel import Parallel


def make_data_group(parallel: Parallel, backend: str):
    """A process group of this rank's data-parallel ranks for this route alone; called by all ranks of the run."""
    own = None
    for pp_rank in range(parallel.pp):
        for tp_rank in range(parallel.tensor_model_parallel_size):
            ranks = [parallel.global_rank(pp_rank, dp_rank, tp_rank) for dp_rank in range(parallel.dp)]
            group = dist.new_group(ranks, backend=backend)
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
        self.stream = device.copy_stream()
        self.worker = Worker("cpu-shard-route") if self.stream is None else None

    def issue(self, whole: torch.Tensor, start: int, shard: torch.Tensor, done=None) -> Transfer:
        """Fill ``whole`` (1D) from all ranks' shards; returns at once. ``shard`` lies in host memory and belongs at
        element ``start``. ``done(lane, start_ns, end_ns)`` is called for both parts, on CPU."""
        part, after = whole.narrow(0, start, shard.numel()), self.device.mark()

        def bring() -> None:
            begin = perf_counter_ns()
            with torch.no_grad():
                part.copy_(shard, non_blocking=True)
            middle = perf_counter_ns()
            dist.all_gather_into_tensor(whole, part, group=self.process_group)
            if done is not None:
                done("cpu", begin, middle)
                done("gpu", middle, perf_counter_ns())

        if self.worker is None:
            transfer = Transfer()
            transfer.after = self.device.on_stream(bring, self.stream, after)
            transfer.finish()
            return transfer

        def run(transfer: Transfer) -> None:
            if self._delay is not None:
                self._delay()
            bring()

        return self.worker.submit(run)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


class CpuShardRoute:
    """The route of groups whose shards rest in host memory."""

    name = "cpu_shard"

    def __init__(self, process_group, device, faults: Faults, recorder=None):
        delay = faults.delayer(faults.copy_delay_ms, salt=59 + dist.get_rank(process_group))
        self.gather, self.recorder = ShardGather(process_group, device, delay), recorder

    def issue(self, group: Group) -> Transfer:
        done = None
        if self.recorder is not None and self.gather.worker is not None:
            recorder, name = self.recorder, f"unshard {group.index}"
            done = lambda lane, start, end: recorder.add(lane, name, start, end)
        return self.gather.issue(group.whole, group.shard_start, group.shard, done)

    def close(self) -> None:
        self.gather.close()
