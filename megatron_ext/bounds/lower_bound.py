"""A proven lower bound on the iteration time of every schedule of a workload.

[Note: Why it is a bound]
The bound is the largest of the following times. The optimizer step is added if it cannot begin before the backward has
ended and no part of it can run on another device. Each time only drops constraints, so it is not above the real one. An
optimizer state on the device leaves less room for whole parameters and gradients, so 2 and 3 hold with it as well.

1. Pipeline: the longest path through all steps and messages, with every group whole in time and nothing disturbed
   (:mod:`megatron_ext.bounds.critical_path`).
2. Device memory: at zero stage 3 parameters that do not fit next to a layer are gathered after that layer has computed
   (:mod:`megatron_ext.bounds.device_memory`). This lengthens the paths of 1. The actions of a step run once its input
   has arrived, so a gather between two steps adds to the time of the message.
3. Gradients: the reduces that must run after the last backward of a chunk, and those that device memory forces at
   every visit (:mod:`megatron_ext.bounds.reduce_bounds`).
4. Links: at some moment at least ``n`` bytes must have arrived (:mod:`megatron_ext.bounds.least_loads`), which takes
   the links of the rank at least ``t(n)`` (:mod:`megatron_ext.bounds.link_rates`). After that moment at least the rest
   ``q`` of the pipeline or of the gradients follows. So iteration >= t(n) + q. For the first step of every chunk, whose
   groups were not there before, ``t(n)`` also delays the paths of 1 and everything that follows them.
"""

from itertools import accumulate
from typing import NamedTuple

from megatron_ext.bounds.critical_path import Durations, compute_durations, earliest, tails
from megatron_ext.bounds.device_memory import with_device_memory
from megatron_ext.bounds.least_loads import Need, least_loads
from megatron_ext.bounds.link_rates import LinkRates
from megatron_ext.bounds.reduce_bounds import LastBackward, forced_reduce_us, last_backwards, least_tail_us, rest_us
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload, optimizer_bytes

REFINED = 24
"""The number of moments for which ``t(n)`` is computed from the curves. The others use the links' best rates."""


def lower_bound(workload: Workload, timing: Timing) -> float:
    """Microseconds per iteration that no valid schedule can beat; see the note above.

    Raises:
        InputError: the table lacks a figure that every run needs.
    """
    ranks, steps = range(workload.parallel.pp), steps_of_ranks(workload.parallel)
    own = [_of_rank(workload, timing, rank) for rank in ranks]
    least = with_device_memory(workload, timing, [one.rates for one in own])
    begins, ends = earliest(workload, timing, least, [*map(_ends_by_links, own)])
    remaining, bound = tails(workload, timing, least), 0.0
    for rank, one in enumerate(own):
        bound = max(bound, ends[rank][-1] + one.tail_us)
        for backward in one.last:
            bound = max(bound, begins[rank][backward.step] + backward.from_start_us)
        first = next(index for index, step in enumerate(steps[rank]) if step.kind == "B")
        bound = max(bound, begins[rank][first] + forced_reduce_us(workload, timing, rank))
        if one.needs:
            bound = max(bound, _links_bound(workload, timing, rank, one, least, remaining[rank]))
    if workload.optimizer.on_host and timing.offers_curve("host_step"):
        return bound
    return bound + max(timing.optimizer_us(optimizer_bytes(workload, rank)) for rank in ranks)


class OfRank(NamedTuple):
    """One rank: the best rates of its links, the bytes that they must bring, the last backward of each of its chunks,
    and the least time that follows its last compute."""

    rates: LinkRates
    needs: list[Need]
    last: list[LastBackward]
    tail_us: float


def _of_rank(workload: Workload, timing: Timing, rank: int) -> OfRank:
    rates, last = LinkRates(workload, timing, rank), last_backwards(workload, timing, rank)
    needs = least_loads(workload, timing, rank) if rates.routes else []
    return OfRank(rates, needs, last, least_tail_us(workload, timing, rank))


def _ends_by_links(own: OfRank) -> dict[int, float]:
    """The earliest end of the first step of each chunk (by step index), from the bytes that its last layer needs."""
    found, fresh, rates = {}, 0.0, own.rates
    for need, following in zip(own.needs, [*own.needs[1:], None]):
        if need.fresh > fresh and (following is None or following.step != need.step):
            fresh = need.fresh
            arrived = max(rates.least_us(need.loaded), rates.least_us(need.fresh, first=True))
            found[need.step] = arrived + need.rest_us
    return found


def _links_bound(
    workload: Workload, timing: Timing, rank: int, own: OfRank, least: Durations, remaining: list[float]
) -> float:
    """Term 4 of the note for one rank."""
    steps, alone = steps_of_ranks(workload.parallel)[rank], compute_durations(workload, timing)
    done = [0.0, *accumulate(alone.step_us(rank, step) for step in steps)]
    moments, rates = [], own.rates
    for need in own.needs:
        rest = remaining[need.step] - least.step_us(rank, steps[need.step]) + need.rest_us
        rest = max(rest, rest_us(done[need.step + 1] - need.rest_us, need.step, own.last))
        moments.append((need.loaded / rates.best_rate + rest, need.loaded, need.fresh, rest))
    moments.sort(reverse=True)
    bound = 0.0
    for rough, loaded, fresh, rest in moments[:REFINED]:
        bound = max(bound, rough, rates.least_us(loaded) + rest, rates.least_us(fresh, first=True) + rest)
    return bound
