"""Time an operation often enough, on every rank at once.

[Note: Compute among the ranks]
What a thread computes alone is timed by processor time on machines without a device, for the
reason given in layer_times.py, and then multiplied by the ranks that share one processor: all of
them do it at once.
"""

from __future__ import annotations

from time import perf_counter, process_time, thread_time

import torch

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operations import Operation

MAX_ROUNDS = 20


class Samples:
    """Times of one operation at one size on this rank, in microseconds; ``transfers``: how many were made, those
    that warmed up included."""

    __slots__ = ("us", "issued_us", "processor_us", "transfers")

    def __init__(self) -> None:
        self.us: list[float] = []
        self.issued_us: list[float] = []
        self.processor_us: list[float] = []
        self.transfers = 0

    def add(self, later: Samples) -> None:
        """Append the samples of a later visit."""
        self.us += later.us
        self.issued_us += later.issued_us
        self.processor_us += later.processor_us
        self.transfers += later.transfers


def timed(fabric: Fabric, operation: Operation, size_bytes: int, round_index: int) -> tuple[float, float, float]:
    """(until complete, until issued, processor time of all threads) in microseconds. On CUDA the
    first is between two events on the current stream, which waits for whatever stream the
    operation ran on, and the last is 0: transports take no processor from compute there."""
    if fabric.torch_device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = perf_counter()
        handle = operation.issue(size_bytes, round_index)
        issued = perf_counter()
        handle.wait()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3, (issued - start) * 1e6, 0.0
    if operation.computes and torch.get_num_threads() == 1:
        start = thread_time()
        operation.issue(size_bytes, round_index).wait()
        us = (thread_time() - start) * 1e6
        return us * fabric.ranks_per_processor, us * fabric.ranks_per_processor, us
    used, start = process_time(), perf_counter()
    handle = operation.issue(size_bytes, round_index)
    issued = perf_counter()
    handle.wait()
    us = (perf_counter() - start) * 1e6
    return us, (issued - start) * 1e6, (process_time() - used) * 1e6


def sample(
    fabric: Fabric,
    operation: Operation,
    size_bytes: int,
    seconds: float,
    *,
    min_rounds: int = 3,
    warmups: int = 2,
    max_rounds: int = MAX_ROUNDS,
) -> Samples:
    """Rounds of ``operation`` for about ``seconds``, all ranks starting together.

    The first rounds warm up and tell rank 0 how many more fit; every rank runs that many: at
    least ``min_rounds``, fewer only where the time is already used up by warming up, and at most ``max_rounds``.
    """
    samples = Samples()
    messages = operation.messages
    round_index = 0
    begin = perf_counter()
    for warm in range(warmups):
        fabric.barrier()
        us, _, _ = timed(fabric, operation, size_bytes, round_index)
        round_index += 1
        if warm + 1 < warmups and fabric.agree(int(us > seconds * 1e6 / 4)):
            break  # so long that what the first round sets up does not show
    left = seconds - (perf_counter() - begin)
    rounds = fabric.agree(max(min_rounds if left > 0 else 1, min(max_rounds, int(left * 1e6 / max(us, 1.0)))))
    for _ in range(rounds):
        fabric.barrier()
        us, issued, used = timed(fabric, operation, size_bytes, round_index)
        round_index += 1
        samples.us.append(us / messages)
        samples.issued_us.append(issued / messages)
        samples.processor_us.append(used / messages)
    samples.transfers = round_index * messages
    return samples
