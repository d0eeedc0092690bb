"""An iteration by another order of steps than Megatron's: what it would take, and what it would keep in memory.

[Note: Without a flush]
PipeDream-2BW (Narayanan et al. 2020, arXiv 2006.09503) runs the 1F1B order over the micro-batches of all iterations.
A rank steps its optimizer behind its last backward of an iteration and waits for no other rank; an iteration computes
with the parameters from before the last step, so that every rank keeps two versions of its parameters.
Several iterations are simulated as one of as many micro-batches: once and once twice as many. The difference is what
they take without filling and draining the pipeline. The optimizer step is added to that. Gathers and reductions that
are due once an iteration have a whole iteration to hide in: they count only where their link is busy for longer.
"""

from typing import NamedTuple

import msgspec

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule.memory_bill import Bill
from megatron_ext.simulator.simulation import Result
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.step_order import in_flight
from megatron_ext.workload.workload import Workload, optimizer_bytes

_ITERATIONS = 2
"""Simulated in a row, and twice as many: behind the first the pipeline is full."""


class OtherOrder(NamedTuple):
    """``in_flight``: by pipeline rank, the most micro-batches whose activations are kept."""

    result: Result
    in_flight: tuple[int, ...]
    weight_versions: int = 1


def evaluate_order(
    workload: Workload, table: CostTable, order: str, *, trace: bool = False, extrapolate: bool = False
) -> OtherOrder:
    """Simulate ``workload`` by stock Megatron's rule in another order: ``gpipe``, ``eager_1f1b`` or ``pipedream_2bw``.

    Raises:
        InputError: the order has no place for the workload's chunks or micro-batches, or as of :func:`evaluate`.
    """
    if order == "pipedream_2bw":
        return _without_flush(workload, table, trace, extrapolate)
    work = _in_order(workload, order)
    return OtherOrder(evaluate(work, table, trace=trace, extrapolate=extrapolate), in_flight(work.parallel))


def _in_order(workload: Workload, order: str, iterations: int = 1) -> Workload:
    microbatches = workload.parallel.num_microbatches * iterations
    parallel: Parallel = msgspec.structs.replace(workload.parallel, order=order, num_microbatches=microbatches)
    parallel.check()
    return msgspec.structs.replace(workload, parallel=parallel)


def _without_flush(workload: Workload, table: CostTable, trace: bool, extrapolate: bool) -> OtherOrder:
    """See the note above."""
    parallel = workload.parallel
    if parallel.num_microbatches < parallel.pp:
        raise InputError(
            f"two weight versions are enough from as many micro-batches as pipeline ranks on, {parallel.pp}",
            field="parallel.num_microbatches",
            value=parallel.num_microbatches,
        )
    order = "1f1b" if parallel.pp > 1 else "no_pipeline"
    shorter, longer = (_in_order(workload, order, times * _ITERATIONS) for times in (1, 2))
    few = evaluate(shorter, table, trace=trace, extrapolate=extrapolate, bound_us=0.0)
    many = evaluate(longer, table, extrapolate=extrapolate, bound_us=0.0)

    def once(first: float, both: float) -> float:
        """Of one iteration, from figures of the run and of the one twice as long: what grows with them, and the rest,
        which every iteration has."""
        grows = (both - first) / _ITERATIONS
        return grows + max(first - _ITERATIONS * grows, 0.0)

    timing = Timing(workload, table, extrapolate=extrapolate)
    busy = {link: once(us, many.busy_us.get(link, us)) for link, us in few.busy_us.items()}
    compute = [parallel.num_microbatches * sum(map(sum, (times.forward, times.backward))) for (times,) in timing.layers]
    sizes = [optimizer_bytes(workload, rank) for rank in range(parallel.pp)]
    optimizer_us = max(map(timing.optimizer_us, sizes))
    pipeline_us = (many.iteration_time_us - few.iteration_time_us) / _ITERATIONS
    pipeline_us = max(pipeline_us, busy.get("gpu", 0.0) + busy.get("reduce", 0.0))
    result = few._replace(
        iteration_time_us=pipeline_us + optimizer_us,
        bubble_rate=1.0 - compute[0] / pipeline_us,
        exposed_us=tuple(max(b - a, 0.0) / _ITERATIONS for a, b in zip(few.exposed_us, many.exposed_us)),
        group_exposed_us={},
        lower_bound_us=max(compute) + optimizer_us,
        busy_us=busy,
        memory=tuple(_second_version(bill, workload) for bill in few.memory),
    )
    return OtherOrder(result, in_flight(shorter.parallel), 2)


def _second_version(bill: Bill, workload: Workload) -> Bill:
    kind = "whole_parameters" if workload.zero_stage < 3 else "shards"
    held = bill.memory.device_bytes.get(kind, 0)
    memory = msgspec.structs.replace(bill.memory, device_bytes={**bill.memory.device_bytes, kind: 2 * held})
    return Bill(memory, tuple(step + held for step in bill.step_device_bytes))
