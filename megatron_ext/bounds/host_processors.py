"""The term of the bound for machines whose ranks compute on shared host processors.

[Note: Why this is a bound]
Processors do at most one microsecond of work in a microsecond each. All compute of an iteration and the processor time
of all transports must fit: what a transport does not get at once is a backlog that is drained before the optimizer
steps (:mod:`megatron_ext.simulator.host_processors`). So, with ``P`` processors on a machine,

1. iteration >= (compute + gathers + reductions + messages of all ranks on the machine) / P,

where every byte costs at least what it costs in the cheapest group that can hold it.
"""

from megatron_ext.bounds.group_sizes import best_rate_sizes, largest_group
from megatron_ext.bounds.least_loads import least_loads
from megatron_ext.bounds.reduce_tail import least_cost_of_groups
from megatron_ext.simulator.activity_kinds import P2P, REDUCE
from megatron_ext.simulator.processor_times import ProcessorTimes
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload


def processor_bound(workload: Workload, timing: Timing) -> float:
    """Least time in which the processors of the busiest machine can do all work; 0 where ranks share none."""
    times = timing.host_cpu
    if times is None:
        return 0.0
    work: dict[int, float] = {}
    for rank, messages in enumerate(_messages(workload)):
        layers = timing.layers[rank]
        compute = sum(sum(t.forward) + sum(t.backward) for t in layers) * workload.parallel.num_microbatches
        transports = _gathering(workload, timing, times, rank) + _reducing(workload, timing, times, rank)
        if timing.p2p_us:
            transports += messages * times.of_kind(P2P, workload.p2p_bytes)
        machine = times.machine_of(rank, 0)
        work[machine] = work.get(machine, 0.0) + times.replicas(rank) * (compute + transports)
    return max(work.values()) / times.count


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


def _gathering(workload: Workload, timing: Timing, times: ProcessorTimes, rank: int) -> float:
    """Processor time of bringing the least bytes by the cheapest route; 0 where the drive is offered, which has no
    curve."""
    needs = least_loads(workload, timing, rank)
    routes = [route for route in ("gpu", "cpu") if timing.offers(route)]
    if not needs or not routes or timing.offers("nvme"):
        return 0.0
    largest = largest_group(workload, workload.chunks_of_rank(rank))
    per_byte = []
    for route in routes:
        measured = {point.size_bytes for point in times.curves.get(f"routes.{route}", ())}
        sizes = best_rate_sizes(measured, largest)
        per_byte.append(min((times.of_curve(f"routes.{route}", size) / size for size in sizes), default=0.0))
    return needs[-1].loaded * min(per_byte)


def _reducing(workload: Workload, timing: Timing, times: ProcessorTimes, rank: int) -> float:
    """Processor time of reducing all gradients of the rank, in the cheapest groups."""

    def cost(own: Timing, size: int) -> float:
        return times.of_kind(REDUCE, size) if own.reduce_us(size) else 0.0

    chunks = workload.chunks_of_rank(rank)
    return sum(us for chunk in chunks for _, us in least_cost_of_groups(workload, chunk, timing, cost))
