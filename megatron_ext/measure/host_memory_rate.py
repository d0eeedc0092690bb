"""What one rank's share of host memory reads and writes in a second: ``host_memory`` of the cost table.

All ranks at once. A rank's processors add arrays that no cache holds, one thread each, and on CUDA copies run in both
directions at the same time. What all of them move counts: three bytes of an addition for each byte of its result, which
is read, added to and written, and one of a copy.
"""

import os
import threading
from statistics import mean, median
from time import monotonic, perf_counter

import numpy

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operations import HostCopy
from megatron_ext.measure.options import MIB
from megatron_ext.runtime import cgroups
from megatron_ext.runtime.objects import gather_objects

ROUNDS, LEAST_SECONDS, MOST_SECONDS = 5, 0.5, 2.0
"""Rounds in which it is measured, and how long all of them take."""

NODE_BYTES, LEAST_BYTES, PIECE_BYTES = 512 * MIB, 16 * MIB, 4 * MIB
"""Of the arrays of a node that are added to, of one thread's, and of what is added at once: short pieces would have the
threads wait for the interpreter, and the one that issues copies wait the longest."""

MOST_OVER = 3.0
"""How many times the time of all rounds may pass, with what making the arrays takes, before no further round begins."""

ADD_BYTES, ROW = 3, 4
"""Moved for each byte of a sum; copies in each direction before the rank looks whether they are done."""


class CopyBack(HostCopy):
    """A whole group from the device to host memory."""

    name = "copy_back"

    def copy(self, target, source):
        return super().copy(source, target)


def processors_of_rank(fabric: Fabric) -> int:
    """Processors of this rank's part of its node."""
    share = cgroups.processors(os.cpu_count() or 1) // fabric.options.node_size
    return max(min(len(os.sched_getaffinity(0)), share), 1)


class Adder(threading.Thread):
    """Adds one array to another until it is told to stop; ``moved`` bytes so far."""

    def __init__(self, arrays: list[numpy.ndarray]):
        super().__init__(daemon=True)
        self.sum, self._part = arrays
        self.moved, self.stopped = 0, threading.Event()

    def run(self) -> None:
        """Without the interpreter's lock while it adds."""
        piece = PIECE_BYTES // 4
        while True:
            for start in range(0, len(self.sum), piece):
                part = slice(start, start + piece)
                numpy.add(self.sum[part], self._part[part], out=self.sum[part])
                self.moved += ADD_BYTES * self.sum[part].nbytes
                if self.stopped.is_set():
                    return


def measure(fabric: Fabric, seconds: float) -> dict[str, float]:
    """``bytes_per_s`` of the mean rank; ``slow_bytes_per_s``: its slowest round, or of the slowest rank.

    Collective.
    """
    begin, lasts = monotonic(), seconds_of(seconds)
    copies = [kind(fabric) for kind in (HostCopy, CopyBack)] if fabric.torch_device.type == "cuda" else []
    count = processors_of_rank(fabric)
    size = max(NODE_BYTES // (count * fabric.options.node_size), LEAST_BYTES)
    # Zeroes would have no pages of their own before they are written. Made once: that takes longer than a round.
    arrays = [[numpy.ones(size // 4, numpy.float32) for _ in range(2)] for _ in range(count)]
    own = [rate(fabric, copies, arrays, lasts / ROUNDS)]
    while len(own) < ROUNDS and not fabric.agree(int(monotonic() > begin + MOST_OVER * lasts)):
        own.append(rate(fabric, copies, arrays, lasts / ROUNDS))
    for operation in copies:
        operation.close()
    everyone = gather_objects(own)
    rounds, ranks = [mean(rates) for rates in zip(*everyone)], map(median, everyone)
    return {"bytes_per_s": median(rounds), "slow_bytes_per_s": min(*rounds, *ranks)}


def seconds_of(seconds: float) -> float:
    """How long all rounds take where there are ``seconds`` for them."""
    return min(max(seconds, LEAST_SECONDS), MOST_SECONDS)


def rate(fabric: Fabric, copies: list[HostCopy], arrays: list[list[numpy.ndarray]], seconds: float) -> float:
    """Bytes a second in one round, in which a thread adds each of ``arrays``."""
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


def _copy(fabric: Fabric, copies: list[HostCopy]) -> int:
    """Some copies in each direction, to their end; bytes that they moved."""
    size = fabric.options.rounded(min(64 * MIB, fabric.options.largest))
    handles = [operation.issue(size, index) for index in range(ROW) for operation in copies]
    for handle in handles:  # only now, or one direction would wait for the other
        handle.wait()
    if copies:
        fabric.device.settle()
    return size * ROW * len(copies)
