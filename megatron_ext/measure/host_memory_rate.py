"""Measures the bytes per second that one rank's share of host memory reads and writes: ``host_memory`` of the cost
table.

All ranks measure at once. A rank's processors add arrays that are too large for the caches, with one thread each. On
CUDA copies run in both directions at the same time. The bytes of all of these count: three bytes for each byte of the
result of an addition (two reads and one write), and one for each byte of a copy.
"""

import os
import threading
from statistics import mean, median
from time import monotonic, perf_counter

import numpy

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operations import TimedHostCopy
from megatron_ext.measure.options import MIB
from megatron_ext.runtime import cgroups
from megatron_ext.runtime.objects import gather_objects

ROUNDS, LEAST_SECONDS, MOST_SECONDS = 5, 0.5, 2.0
"""The number of rounds, and the limits of the time of all of them."""

NODE_BYTES, LEAST_BYTES, PIECE_BYTES = 512 * MIB, 16 * MIB, 4 * MIB
"""Bytes of all arrays of a node that are added to, the least bytes of one thread's array, and the bytes of one
addition. With shorter pieces the threads would wait for the interpreter, most of all the thread that issues copies."""

MOST_OVER = 3.0
"""No further round begins after this many times the time of all rounds, including the time of making the arrays."""

ADD_BYTES, ROW = 3, 4
"""Bytes moved for each byte of a sum; copies in each direction before the rank waits for them."""


class CopyBack(TimedHostCopy):
    """A whole group from the device to host memory."""

    name = "copy_back"

    def copy(self, target, source):
        return super().copy(source, target)


def processors_of_rank(fabric: Fabric) -> int:
    """Processors of this rank's part of its node."""
    share = cgroups.processor_quota(os.cpu_count() or 1) // fabric.options.node_size
    return max(min(len(os.sched_getaffinity(0)), share), 1)


class Adder(threading.Thread):
    """Adds one array to another until it is told to stop. ``moved``: bytes moved so far."""

    def __init__(self, arrays: list[numpy.ndarray]):
        super().__init__(daemon=True)
        self.sum, self._part = arrays
        self.moved, self.stopped = 0, threading.Event()

    def run(self) -> None:
        """Add pieces; NumPy releases the interpreter's lock meanwhile."""
        piece = PIECE_BYTES // 4
        while True:
            for start in range(0, len(self.sum), piece):
                part = slice(start, start + piece)
                numpy.add(self.sum[part], self._part[part], out=self.sum[part])
                self.moved += ADD_BYTES * self.sum[part].nbytes
                if self.stopped.is_set():
                    return


def measure(fabric: Fabric, seconds: float) -> dict[str, float]:
    """``bytes_per_s``: the mean over ranks. ``slow_bytes_per_s``: the lesser of its slowest round and the slowest rank.

    Collective.
    """
    begin, lasts = monotonic(), min(max(seconds, LEAST_SECONDS), MOST_SECONDS)
    copies = [kind(fabric) for kind in (TimedHostCopy, CopyBack)] if fabric.torch_device.type == "cuda" else []
    count = processors_of_rank(fabric)
    size = max(NODE_BYTES // (count * fabric.options.node_size), LEAST_BYTES)
    # Ones, because zeroes would have no pages of their own before they are written. Made once, because making them
    # takes longer than a round.
    arrays = [[numpy.ones(size // 4, numpy.float32) for _ in range(2)] for _ in range(count)]
    own = [rate(fabric, copies, arrays, lasts / ROUNDS)]
    while len(own) < ROUNDS and not fabric.agree(int(monotonic() > begin + MOST_OVER * lasts)):
        own.append(rate(fabric, copies, arrays, lasts / ROUNDS))
    for operation in copies:
        operation.close()
    everyone = gather_objects(own)
    rounds, ranks = [mean(rates) for rates in zip(*everyone)], map(median, everyone)
    return {"bytes_per_s": median(rounds), "slow_bytes_per_s": min(*rounds, *ranks)}


def rate(fabric: Fabric, copies: list[TimedHostCopy], arrays: list[list[numpy.ndarray]], seconds: float) -> float:
    """Bytes per second in one round, with one thread for each pair of ``arrays``."""
    adders = [Adder(own) for own in arrays]
    fabric.barrier()
    for adder in adders:
        adder.start()
    start, moved = perf_counter(), 0
    while perf_counter() - start < seconds:
        moved += _copy(fabric, copies)
        if not copies:
            adders[0].join(seconds)
    taken = perf_counter() - start
    moved += sum(adder.moved for adder in adders)
    for adder in adders:
        adder.stopped.set()
    for adder in adders:
        adder.join()
    fabric.barrier()
    return moved / taken


def _copy(fabric: Fabric, copies: list[TimedHostCopy]) -> int:
    """Make some copies in each direction and wait for them. Returns the bytes that they moved."""
    size = fabric.options.rounded(min(64 * MIB, fabric.options.largest))
    handles = [operation.issue(size, index) for index in range(ROW) for operation in copies]
    for handle in handles:  # after all are issued: otherwise one direction would wait for the other
        handle.wait()
    if copies:
        fabric.device.settle()
    return size * ROW * len(copies)
