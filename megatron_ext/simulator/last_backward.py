"""What no schedule can avoid around the last backward of a chunk: reducing gradients, and sharing processors.

[Note: Why these are bounds]
* Gradients of a layer can be reduced only after its last backward; so from there on are reduced
  all of this layer, of those below it and of chunks whose last backward comes later. Groups are
  whole parameters, so each byte is reduced at no better rate, and with no less of a processor,
  than in some group at least as large as its parameter and no larger than the device may hold.
  While the rank computes, reducing is slowed by what the table says, and takes processors from
  that compute: :func:`_from_start` says what is left after compute at least.
* Data-parallel ranks of one pipeline rank behave alike: all are at their last backward together,
  and before it their compute, and the cheapest transport of all that must have come, take
  processors; what comes by ``cpu`` for the first time has been published before. The engine leaves at least half of the processors to compute, so transports
  are counted only as far as all of them together could take the other half.
"""

from math import inf
from typing import NamedTuple

from megatron_ext.cost.curve import curves_of
from megatron_ext.errors import InputError
from megatron_ext.simulator.least_loads import least_loads
from megatron_ext.simulator.stock import buckets
from megatron_ext.simulator.timing import COMPUTE, CPU, GPU, PADDING_SHARE, PUBLISH, REDUCE, Timing
from megatron_ext.workload.model import Chunk, Workload, group_bytes
from megatron_ext.workload.order import steps_of_ranks

_LINKS = {"gpu": GPU, "cpu": CPU}


class LastBackward(NamedTuple):
    """The last backward of a chunk, at index ``step`` of its rank's steps. ``compute_us``: compute of
    the rank from there on, ``before_us``: before it. ``from_start_us``: no less from its beginning until
    all gradients that were not complete are reduced. ``loaded``: bytes that must have come before it,
    ``fresh`` of them different ones."""

    step: int
    compute_us: float
    before_us: float
    from_start_us: float
    loaded: float
    fresh: float


class Reducing(NamedTuple):
    """What reducing some parameters takes at least: microseconds alone, and of every one of these
    the share that it takes from a processor."""

    us: float = 0.0
    share: float = inf

    def __add__(self, other: "Reducing") -> "Reducing":
        return Reducing(self.us + other.us, min(self.share, other.share))


def last_backwards(workload: Workload, timing: Timing) -> list[list[LastBackward]]:
    """By pipeline rank, the last backward of each of its chunks, the last first."""
    pp = workload.parallel.pp
    found = []
    for rank, steps in enumerate(steps_of_ranks(workload.parallel)):
        count, tail_us = replicas(workload, timing, rank), least_tail_us(workload, timing, rank)
        needs = least_loads(workload, timing, rank)
        mine, seen, compute, reducing, waiting = [], set(), 0.0, Reducing(), [(0.0, Reducing())]
        whole = sum(sum(t.forward) + sum(t.backward) for t in timing.layers[rank]) * workload.parallel.num_microbatches
        for index in range(len(steps) - 1, -1, -1):
            chunk, backward = steps[index].stage // pp, steps[index].kind == "B"
            times = timing.layers[rank][chunk]
            if not backward or chunk in seen:
                compute += sum(times.backward if backward else times.forward)
                continue
            seen.add(chunk)
            from_start, above = 0.0, sum(times.backward)
            for layer, least in enumerate(least_reducing(workload, workload.chunk(rank, chunk), timing)):
                reducing += least
                if least.us:  # not before this layer's own backward
                    waiting.append((compute, reducing))
                    from_start = max(from_start, _compute_us(above, timing, count) + _from_start(compute, waiting, timing, count, tail_us))
                above -= times.backward[layer]
                compute += times.backward[layer]
            from_start = max(from_start, _from_start(compute, waiting, timing, count, tail_us))
            before = [need for need in needs if need.step < index]
            loaded, fresh = max(((need.loaded, need.fresh) for need in before), default=(0.0, 0.0))
            mine.append(LastBackward(index, compute, whole - compute, from_start, loaded, fresh))
        found.append(mine)
    return found


def largest_group(workload: Workload, chunks: tuple[Chunk, ...]) -> int:
    """No group of these chunks is larger: not than a bucket, nor than what the device may hold whole."""
    largest = max((group_bytes(part, workload.parallel.dp) for chunk in chunks for part in buckets(chunk)), default=0)
    limit = workload.limits.device_bytes if workload.zero_stage == 3 else None
    return largest if limit is None else min(largest, limit)


def least_reducing(workload: Workload, chunk: Chunk, timing: Timing) -> list[Reducing]:
    """By layer: no grouping of a chunk's parameters is reduced by less, alone; 0 without such a curve."""
    found = [Reducing()] * chunk.num_layers
    if timing.table.reduce is None or not chunk.bytes:
        return found
    largest = largest_group(workload, (chunk,))
    measured = {point.size_bytes for points in curves_of(timing.table.reduce).values() for point in points}
    sizes = plannable(measured, largest) | {parameter.bytes for parameter in chunk.parameters}
    us, processor_us, least = inf, inf, {}
    for size in sorted(sizes, reverse=True):
        try:
            us = min(us, timing.reduce_us(size) / size)
            processor_us = min(processor_us, timing.processor_us(REDUCE, size) / size)
        except InputError:  # larger groups than measured cannot be planned
            pass
        least[size] = (us, processor_us / us if 0 < us < inf else 0.0)
    for parameter in chunk.parameters:
        per_byte, share = least[parameter.bytes]
        if 0 < per_byte < inf:
            found[parameter.layer] += Reducing(parameter.bytes * per_byte, share)
    return found


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
        machine, count = timing.machine_of(rank, 0), replicas(workload, timing, rank)
        work[machine] = work.get(machine, 0.0) + count * (mine[0].before_us + mine[0].compute_us)
        gathering = _Gathering(workload, timing, rank, count)
        for one in mine:
            bound = max(bound, count * (one.before_us + gathering.least_us(one)) / timing.processors + one.from_start_us)
    return max(bound, max(work.values()) / timing.processors + min(least_tail_us(workload, timing, rank) for rank in range(len(last))))


def rest_us(done_us: float, step: int, mine: list[LastBackward], timing: Timing, count: int) -> float:
    """No less follows on a rank that has computed ``done_us``, in step ``step``, with no gradient reduced yet."""
    return max((_compute_us(one.before_us - done_us, timing, count) + one.from_start_us for one in mine if one.step > step), default=0.0)


def replicas(workload: Workload, timing: Timing, rank: int) -> int:
    """How many ranks of a pipeline rank share a machine: that of its first replica, which the engine
    simulates for all of them."""
    parallel = workload.parallel
    places = (timing.machine_of(rank, dp, tp) for dp in range(parallel.dp) for tp in range(parallel.tensor_model_parallel_size))
    return sum(place == timing.machine_of(rank, 0) for place in places)


def _compute_us(alone_us: float, timing: Timing, count: int) -> float:
    """Least time in which ``count`` ranks of a machine each compute this."""
    return alone_us if timing.processors is None else alone_us * max(1.0, count / timing.processors)


def _from_start(compute_us: float, waiting: list[tuple[float, Reducing]], timing: Timing, count: int, tail_us: float) -> float:
    """Least time in which ``count`` ranks of a machine each compute ``compute_us`` and reduce.

    ``waiting``: with so much of that compute still to come, the first of so much may be reduced; all
    of it, the last. Of ``total`` microseconds of reducing, each done beside compute makes that
    ``takes`` longer; what is not done beside it comes after. Of the ``part`` that waits for all
    but ``left`` of compute, with ``s`` by which it is stretched, at most ``(left + s) / slower``
    can be done beside it, and ``s`` is at least ``takes`` times that: so at most
    ``left / (slower - takes)``. Stretching compute further, or idling, costs no less than the
    reducing that it hides.
    """
    processors, slower = timing.processors, 1.0 + timing.least_excess(REDUCE, COMPUTE)
    alone, total = _compute_us(compute_us, timing, count), waiting[-1][1]
    takes = 0.0
    if processors is not None and count >= processors and total.us:
        takes = min(count * total.share / processors, 0.5)  # the engine leaves compute the other half
    after = (1.0 - takes) * max(part.us - _compute_us(left, timing, count) / (slower - takes) for left, part in waiting)
    return alone + max(takes * total.us + after, tail_us)


def _points(timing: Timing, kind: int):
    table = timing.table
    curve = {REDUCE: table.reduce, GPU: table.routes.gpu, CPU: table.routes.cpu, PUBLISH: table.publish.cpu}[kind]
    return [(point.size_bytes, point.p50_us) for points in curves_of(curve or ()).values() for point in points if point.size_bytes and point.p50_us]


def _shares(timing: Timing, kind: int) -> list[float]:
    """Of a processor, that transports of ``kind`` take, by measured size."""
    return [timing.processor_us(kind, size) / us for size, us in _points(timing, kind)]


def _capped(timing: Timing, shares: list[float], count: int) -> float:
    """The part of what transports with these shares of a processor take that compute cannot have back."""
    most = count * max(shares, default=0.0)
    return min(1.0, timing.processors / 2 / most) if most else 1.0


class _Gathering:
    """Processor time that transports of one rank's parameters take from compute at least."""

    def __init__(self, workload: Workload, timing: Timing, rank: int, count: int):
        kinds = [kind for route, kind in _LINKS.items() if timing.offers(route)]
        self.known = bool(kinds) and not timing.offers("nvme")  # the drive's part has no row of its own
        if not self.known:
            return
        largest = largest_group(workload, workload.chunks_of_rank(rank))
        per_byte = {kind: _least_per_byte(timing, kind, largest) for kind in (*kinds, PUBLISH)}
        self.again = min(per_byte[kind] for kind in kinds)
        self.first = min(per_byte[kind] + (per_byte[PUBLISH] if kind == CPU else 0.0) for kind in kinds)
        together = [*kinds, PUBLISH] if CPU in kinds else kinds
        self.capped = _capped(timing, [sum(max(_shares(timing, kind), default=0.0) for kind in together)], count)

    def least_us(self, one: LastBackward) -> float:
        """Of what has come before ``one``, by the cheapest route, whatever its groups."""
        return (one.fresh * self.first + (one.loaded - one.fresh) * self.again) * self.capped if self.known else 0.0


def _least_per_byte(timing: Timing, kind: int, largest: int) -> float:
    """Processor time of one byte, in whatever group of at most ``largest`` bytes it goes."""
    sizes = plannable({size for size, _ in _points(timing, kind)}, largest)
    return min((timing.processor_us(kind, size) / size for size in sizes), default=0.0)
