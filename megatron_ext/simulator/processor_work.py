"""Processor time that no schedule can avoid, where ranks share processors.

[Note: Why these are bounds]
* Groups are whole parameters, so each byte is gathered, published and reduced at no better rate,
  and with no less of a processor, than in some group at least as large as its parameter and no
  larger than the device may hold. How often it is gathered: :mod:`megatron_ext.simulator.least_loads`.
* Processors do no more than all of them can: what they compute and what transports take, over the
  whole iteration, since what transports could not have at once they are owed (processors.py).
* Until some moment of it, transports may be owed what they have not had; while they are, half of the
  processors is theirs. So with ``D(s)`` what they have asked for until ``s``, they have had by ``t`` at least the
  least ``D(s) + (t - s) * processors / 2`` of all moments ``s <= t`` (as of a queue: Lindley 1952). What must have
  come by a moment was asked for by then, before it no faster than all of a rank's transports at once can ask;
  and two moments are no nearer than the compute between them: :meth:`Gathering.had_us`.
"""

from math import inf
from typing import NamedTuple

from megatron_ext.cost.curve import curves_of
from megatron_ext.errors import InputError
from megatron_ext.simulator.least_loads import least_loads
from megatron_ext.simulator.stock import buckets
from megatron_ext.simulator.timing import P2P, PADDING_SHARE, REDUCE, Timing
from megatron_ext.workload.model import Chunk, Workload, group_bytes
from megatron_ext.workload.nodes import crossing_bytes
from megatron_ext.workload.order import steps_of_ranks

_ACROSS = "publish.internode"


class Reducing(NamedTuple):
    """What reducing some parameters takes at least: microseconds alone, and of every one of these
    the share that it takes from a processor."""

    us: float = 0.0
    share: float = inf

    def __add__(self, other: "Reducing") -> "Reducing":
        return Reducing(self.us + other.us, min(self.share, other.share))


def total_us(workload: Workload, timing: Timing) -> float:
    """Compute and the least transports of an iteration, over the processors of the busiest machine; 0 where ranks do not share any."""
    if timing.processors is None:
        return 0.0
    work: dict[int, float] = {}
    for rank, messages in enumerate(_messages(workload)):
        compute = sum(sum(times.forward) + sum(times.backward) for times in timing.layers[rank]) * workload.parallel.num_microbatches
        needs = least_loads(workload, timing, rank)
        gathering = Gathering(workload, timing, rank).least_us(needs[-1].loaded, needs[-1].fresh) if needs else 0.0
        reducing = sum(least.us * least.share for chunk in workload.chunks_of_rank(rank) for least in least_reducing(workload, chunk, timing) if least.us)
        sending = messages * timing.processor_us(P2P, workload.p2p_bytes) if timing.p2p_us else 0.0
        machine = timing.machine_of(rank, 0)
        work[machine] = work.get(machine, 0.0) + replicas(workload, timing, rank) * (compute + gathering + reducing + sending)
    return max(work.values()) / timing.processors


def _messages(workload: Workload) -> list[int]:
    """By pipeline rank, how many messages it sends and receives."""
    parallel = workload.parallel
    stages, found = parallel.pp * parallel.vp, [0] * parallel.pp
    for rank, steps in enumerate(steps_of_ranks(parallel)):
        for step in steps:
            target = step.stage + (1 if step.kind == "F" else -1)
            if 0 <= target < stages and target % parallel.pp != rank:
                found[rank] += 1
                found[target % parallel.pp] += 1
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


def replicas(workload: Workload, timing: Timing, rank: int) -> int:
    """How many ranks of a pipeline rank share a machine: that of its first replica, which the engine
    simulates for all of them."""
    parallel = workload.parallel
    places = (timing.machine_of(rank, dp, tp) for dp in range(parallel.dp) for tp in range(parallel.tensor_model_parallel_size))
    return sum(place == timing.machine_of(rank, 0) for place in places)


def _points(timing: Timing, curve: str):
    return [(point.size_bytes, point.p50_us) for points in curves_of(timing.curve(curve) or ()).values() for point in points if point.size_bytes and point.p50_us]


def _shares(timing: Timing, curve: str) -> list[float]:
    """Of a processor, that transports of this curve take, by measured size."""
    return [timing.curve_processor_us(curve, size) / us for size, us in _points(timing, curve)]


class Come(NamedTuple):
    """``loaded`` bytes have come, ``fresh`` of them different ones, no less than ``ago_us`` before some moment."""

    loaded: float
    fresh: float
    ago_us: float


class Gathering:
    """Processor time that transports of one rank's parameters take from compute at least."""

    def __init__(self, workload: Workload, timing: Timing, rank: int):
        routes = [route for route in ("gpu", "cpu") if timing.offers(route)]
        self.known = bool(routes) and not timing.offers("nvme")  # the drive's part has no row of its own
        if not self.known:
            return
        largest = largest_group(workload, workload.chunks_of_rank(rank))
        per_byte = {route: _least_per_byte(timing, f"routes.{route}", largest) for route in routes}
        publishing = _least_publishing(timing, rank, largest)
        self.again = min(per_byte.values())
        self.first = min(us + (publishing if route == "cpu" else 0.0) for route, us in per_byte.items())
        shares = [max(_shares(timing, f"routes.{route}"), default=0.0) for route in routes]
        if "cpu" in routes:  # one part of publishing goes after the other
            shares.append(max((*_shares(timing, "publish.cpu"), *_shares(timing, _ACROSS)), default=0.0))
        self.count, self.half = replicas(workload, timing, rank), timing.processors / 2
        most = self.count * sum(shares)
        self.capped = min(1.0, self.half / most) if most else 1.0

    def least_us(self, loaded: float, fresh: float) -> float:
        """Of ``loaded`` bytes, ``fresh`` of them different ones, by the cheapest route, whatever their groups."""
        return fresh * self.first + (loaded - fresh) * self.again if self.known else 0.0

    def had_us(self, come: list[Come]) -> float:
        """Processor time that such transports of all ranks on the machine have had by a moment, ``come`` earliest first."""
        if not self.known:
            return 0.0
        least, asked = inf, 0.0
        for one in come:
            more = self.count * self.least_us(one.loaded, one.fresh) - asked
            least = min(least, asked + self.capped * more + self.half * one.ago_us)
            asked += more
        return min(least, asked)


def _least_per_byte(timing: Timing, curve: str, largest: int) -> float:
    """Processor time of one byte, in whatever group of at most ``largest`` bytes it goes."""
    sizes = plannable({size for size, _ in _points(timing, curve)}, largest)
    return min((timing.curve_processor_us(curve, size) / size for size in sizes), default=0.0)


def _least_publishing(timing: Timing, rank: int, largest: int) -> float:
    """Processor time of publishing one byte of a group of at most ``largest`` bytes, between nodes as well."""
    nodes, us = timing.crosses_nodes[rank], _least_per_byte(timing, "publish.cpu", largest)
    if us and nodes > 1 and timing.costs.offers_publish("internode"):
        us += _least_per_byte(timing, _ACROSS, max(crossing_bytes(largest, nodes), 1)) * (nodes - 1) / nodes
    return us
