"""Do copies, all-gathers and compute really run at the same time? Measured by the operations that a run issues.

[Note: Overlap]
Two kinds of work take T1 and T2 alone, and T together. Their overlap is (T1 + T2 - T) / min(T1, T2): 1 if the shorter
one is hidden, 0 if they run one after the other. The numbers of rounds are chosen so that both take about equally long.
On a device all rounds are issued before the first is waited for, so the host's work is hidden as it is in training.
The pairs with all-gathers have not yet run on GPUs.
"""

import os
from time import perf_counter

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import Place
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operation import Operation
from megatron_ext.measure.operations import MatrixProduct, TimedGather, TimedHostCopy, TimedPublish
from megatron_ext.runtime.objects import gather_objects

PAIRS = (("gpu", "compute"), ("cpu", "compute"), ("gpu", "cpu"), ("publish", "cpu"))
LABELS = {"gpu": "all-gather", "cpu": "host-to-device copy", "publish": "device-to-host copy", "compute": "compute"}

LEAST_OVERLAP = 0.5
"""Below this a pair counts as running one after the other."""

ROUND_SECONDS = {"cpu": 0.01, "cuda": 0.1}
"""About how long one kind of work takes alone, by kind of device."""

REPEATS = 3
MOST_ROUNDS = 2000


def overlap_of(first: float, second: float, together: float) -> float:
    """The part of the shorter of two times that is hidden behind the longer one, from 0 to 1; see [Note: Overlap]."""
    return (first + second - together) / min(first, second)


def check(place: Place, fabric: Fabric, size_bytes: int) -> list[Finding]:
    """The overlap of every pair of :data:`PAIRS`. Collective.

    Args:
        size_bytes: size of one transfer.
    """
    operations: dict[str, Operation] = {
        kind.name: kind(fabric)
        for kind in (TimedHostCopy, TimedPublish, MatrixProduct, *([TimedGather] if place.world_size > 1 else []))
    }
    work = EqualRounds(fabric, operations, size_bytes, ROUND_SECONDS[place.device.type])
    found = [pair(place, work, first, second) for first, second in PAIRS]
    for operation in operations.values():
        operation.close()
    return found


class EqualRounds:
    """For each operation, a number of rounds for which all operations take about equally long.

    Args:
        operations: operations by name.
        seconds: about how long all rounds of one operation take.
    """

    def __init__(self, fabric: Fabric, operations: dict[str, Operation], size_bytes: int, seconds: float):
        self.fabric, self.operations, self.size_bytes = fabric, operations, size_bytes
        self.rounds = dict.fromkeys(operations, 2)
        self.alone: dict[str, float] = {}
        for name in operations:
            self.time(name)  # the first rounds make pages and connections
            each = self.time(name) / self.rounds[name]
            self.rounds[name] = fabric.agree(max(2, min(int(seconds / max(each, 1e-9)), MOST_ROUNDS)))
            self.alone[name] = self.time(name)

    def time(self, *names: str) -> float:
        """Seconds until all rounds of ``names`` are done on every rank; the minimum of a few tries."""
        return min(self._once(names) for _ in range(REPEATS))

    def _once(self, names: tuple[str, ...]) -> float:
        transfers = [name for name in names if name != MatrixProduct.name]
        self.fabric.device.settle()
        self.fabric.barrier()
        start = perf_counter()
        handles = []
        for index in range(max((self.rounds[name] for name in transfers), default=0)):
            for name in transfers:
                if index < self.rounds[name]:
                    handles.append(self.operations[name].issue(self.size_bytes, index))
        if MatrixProduct.name in names:
            for index in range(self.rounds[MatrixProduct.name]):
                self.operations[MatrixProduct.name].issue(self.size_bytes, index)
        for handle in handles:
            handle.wait()
        self.fabric.device.settle()
        return max(gather_objects(perf_counter() - start))


def pair(place: Place, work: EqualRounds, first: str, second: str) -> Finding:
    """The finding for two kinds of work. It passes or fails only if every rank has a device to itself."""
    name = f"overlap: {LABELS[first]}, {LABELS[second]}"
    if first not in work.operations:
        return not_tried(name, "there is only one rank, so nothing is gathered")
    together = work.time(first, second)
    share = overlap_of(work.alone[first], work.alone[second], together)
    found = f"{share:.0%} of the shorter one is hidden"
    figures: dict[str, float | str] = {
        f"{LABELS[first]}_seconds": work.alone[first],
        f"{LABELS[second]}_seconds": work.alone[second],
        "together_seconds": together,
        "overlap": share,
    }
    shared = place.ranks_per_device > 1
    if shared or not place.on_cuda:
        where = "for ranks that share one device" if shared else "on host processors"
        return not_tried(name, f"{found}, {where}, which says nothing about ranks with a GPU each", figures=figures)
    if share < LEAST_OVERLAP:
        return failed(name, found, _advice(first, second), figures)
    return passed(name, found, figures=figures)


def _advice(first: str, second: str) -> str:
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    advice = f"CUDA_DEVICE_MAX_CONNECTIONS is {connections}: with 1, work of several streams may queue up; "
    if "gpu" in (first, second):
        advice += "an all-gather's kernels use the GPU's multiprocessors: see NCCL_MAX_CTAS"
    else:
        advice += "is the memory page-locked (see pinning)? Does the GPU share its PCIe link (nvidia-smi topo -m)?"
    return f"{advice}; `measure` writes the slowdown into the cost table, and `plan` includes it"
