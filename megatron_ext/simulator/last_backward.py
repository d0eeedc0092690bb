"""What no schedule can avoid around the last backward of a chunk: reducing gradients, and sharing processors.

[Note: Why these are bounds]
* Gradients of a chunk can be reduced only after its last backward has begun; so from there on are
  reduced all of this chunk and of those whose last backward comes later. Groups are whole
  parameters, so each byte is reduced at no better rate than that of some group at least as
  large as its parameter. While the rank computes, reducing is slowed by what the table says, and
  takes processors from that compute. With ``y`` microseconds of reducing beside compute the rest
  comes after it; the time is linear in ``y``, so the least is at one of its ends.
* Data-parallel ranks of one pipeline rank behave alike: all are at their last backward together,
  and before it their compute, and the cheapest transport of all that must have come, take
  processors. The engine leaves at least half of the processors to compute, so transports
  are counted only as far as all of them together could take the other half.
"""

from typing import NamedTuple

from megatron_ext.cost.curve import curves_of
from megatron_ext.errors import InputError
from megatron_ext.simulator.least_loads import least_loads
from megatron_ext.simulator.stock import buckets
from megatron_ext.simulator.timing import COMPUTE, CPU, GPU, PADDING_SHARE, REDUCE, Timing
from megatron_ext.workload.model import Chunk, Workload, group_bytes
from megatron_ext.workload.order import steps_of_ranks

_LINKS = {"gpu": GPU, "cpu": CPU}


class LastBackward(NamedTuple):
    """The last backward of a chunk, at index ``step`` of its rank's steps. ``compute_us``: compute of
    the rank from there on, ``before_us``: before it. ``from_start_us``: no less from its beginning until
    all gradients that were not complete are reduced. ``loaded``: bytes that must have come before it."""

    step: int
    compute_us: float
    before_us: float
    from_start_us: float
    loaded: float


def last_backwards(workload: Workload, timing: Timing) -> list[list[LastBackward]]:
    """By pipeline rank, the last backward of each of its chunks, the last first."""
    pp, dp = workload.parallel.pp, workload.parallel.dp
    found = []
    for rank, steps in enumerate(steps_of_ranks(workload.parallel)):
        count = _replicas(workload, timing, rank)
        times = [(sum(t.forward), sum(t.backward)) for t in timing.layers[rank]]
        needs = least_loads(workload, timing, rank)
        mine, seen, compute, reduce = [], set(), 0.0, 0.0
        whole = sum(map(sum, times)) * workload.parallel.num_microbatches
        for index in range(len(steps) - 1, -1, -1):
            chunk, backward = steps[index].stage // pp, steps[index].kind == "B"
            compute += times[chunk][backward]
            if backward and chunk not in seen:
                seen.add(chunk)
                reduce += least_reduce_us(workload.chunk(rank, chunk), timing, dp)
                loaded = max((need.loaded for need in needs if need.step < index), default=0.0)
                mine.append(LastBackward(index, compute, whole - compute, _from_start(compute, reduce, timing, count, least_tail_us(workload, timing, rank)), loaded))
        found.append(mine)
    return found


def least_reduce_us(chunk: Chunk, timing: Timing, dp: int) -> float:
    """No grouping of a chunk's parameters is reduced in less, alone; 0 without such a curve."""
    if timing.table.reduce is None or not chunk.bytes:
        return 0.0
    largest = max(group_bytes(part, dp) for part in buckets(chunk))
    measured = {point.size_bytes for points in curves_of(timing.table.reduce).values() for point in points}
    sizes = plannable(measured, largest) | {parameter.bytes for parameter in chunk.parameters}
    least, per_byte = float("inf"), {}
    for size in sorted(sizes, reverse=True):
        try:
            least = min(least, timing.reduce_us(size) / size)
        except InputError:  # larger groups than measured cannot be planned
            pass
        per_byte[size] = least
    return sum(parameter.bytes * per_byte[parameter.bytes] for parameter in chunk.parameters if per_byte[parameter.bytes] < float("inf"))


def plannable(measured: set[int], largest: int) -> set[int]:
    """Sizes at which a group of at most ``largest`` bytes can have its best rate: measured ones, the
    largest, and the largest that padding may carry past what was measured."""
    slack = max(measured, default=0) * PADDING_SHARE // (PADDING_SHARE - 1)
    return {size for size in (*measured, largest, slack) if 0 < size <= largest}


def least_tail_us(workload: Workload, timing: Timing, rank: int) -> float:
    """No less passes between a rank's last compute and the end of reducing its gradients: one group
    holds what its very last layer computes with, if that has parameters."""
    pp = workload.parallel.pp
    chunk = workload.chunk(rank, steps_of_ranks(workload.parallel)[rank][-1].stage // pp)
    return timing.least_reduce_us if any(parameter.layer == 0 for parameter in chunk.parameters) else 0.0


def processor_bound(workload: Workload, timing: Timing, last: list[list[LastBackward]]) -> float:
    """The bound by processors that ranks of a machine share; 0 where they do not."""
    if timing.processors is None:
        return 0.0
    work: dict[int, float] = {}
    bound = 0.0
    for rank, mine in enumerate(last):
        machine, count = timing.machine_of(rank, 0), _replicas(workload, timing, rank)
        work[machine] = work.get(machine, 0.0) + count * (mine[0].before_us + mine[0].compute_us)
        for one in mine:
            before = one.before_us + _least_gather_processor_us(timing, one.loaded, count)
            bound = max(bound, count * before / timing.processors + one.from_start_us)
    return max(bound, max(work.values()) / timing.processors + min(least_tail_us(workload, timing, rank) for rank in range(len(last))))


def _replicas(workload: Workload, timing: Timing, rank: int) -> int:
    """How many ranks of a pipeline rank share a machine: that of its first replica, which the engine
    simulates for all of them."""
    parallel = workload.parallel
    places = (timing.machine_of(rank, dp, tp) for dp in range(parallel.dp) for tp in range(parallel.tensor_model_parallel_size))
    return sum(place == timing.machine_of(rank, 0) for place in places)


def _from_start(compute_us: float, reduce_us: float, timing: Timing, count: int, tail_us: float) -> float:
    """Least time in which ``count`` ranks of a machine each compute ``compute_us`` and reduce ``reduce_us``."""
    processors = timing.processors
    slower = 1.0 + timing.least_excess(REDUCE, COMPUTE)
    alone = compute_us if processors is None else compute_us * max(1.0, count / processors)
    after = alone + reduce_us  # nothing is reduced beside compute
    takes = 0.0 if processors is None or count < processors else count / processors * _least_share(timing, REDUCE, count)
    if takes < slower:
        compute = alone / (1.0 - takes / slower)
        beside = compute / slower
        if beside > reduce_us:
            beside, compute = reduce_us, alone + takes * reduce_us
        after = min(after, compute + reduce_us - beside)
    return max(after, alone + tail_us)


def _points(timing: Timing, kind: int):
    table = timing.table
    curve = {REDUCE: table.reduce, GPU: table.routes.gpu, CPU: table.routes.cpu}[kind]
    return [(point.size_bytes, point.p50_us) for points in curves_of(curve or ()).values() for point in points if point.size_bytes and point.p50_us]


def _capped(timing: Timing, shares: list[float], count: int) -> float:
    """The part of what transports with these shares of a processor take that compute cannot have back."""
    most = count * max(shares, default=0.0)
    return min(1.0, timing.processors / 2 / most) if most else 1.0


def _least_share(timing: Timing, kind: int, count: int) -> float:
    """The least share of a processor that transports of ``kind`` take from compute."""
    shares = [timing.processor_us(kind, size) / us for size, us in _points(timing, kind)]
    return min(shares, default=0.0) * _capped(timing, shares, count)


def _least_gather_processor_us(timing: Timing, size_bytes: float, count: int) -> float:
    """Processor time that ``size_bytes`` take from compute by the cheapest route, whatever its groups."""
    least = float("inf")
    most: list[float] = []
    for route, kind in _LINKS.items():
        if timing.offers(route):
            points = _points(timing, kind)
            least = min(least, min(timing.processor_us(kind, size) / size for size, _ in points))
            most.append(max(timing.processor_us(kind, size) / us for size, us in points))
    if timing.offers("nvme") or not most:
        return 0.0  # its drive's part has no row of its own
    return size_bytes * least * _capped(timing, [sum(most)], count)
