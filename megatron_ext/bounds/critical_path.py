"""The longest path through the pipeline: the earliest end of each step, and the least time that must follow a step.

[Note: Longest path]
Symbols: ``i`` is a step of a rank, ``i - 1`` is the step before it on the same rank. ``gap(i)`` is the least time for
gathers that are issued after ``i - 1`` and that the first layer of ``i`` needs
(:mod:`megatron_ext.bounds.device_memory`).

1. start of i >= end of i - 1 + gap(i).
2. start of i >= arrival of the input of i + gap(i). The actions of a step run once its input has arrived, so gathers
   that are issued after ``i - 1`` are issued after the arrival.
3. end of i >= start of i + least duration of i.
4. end of j >= start of i + span(i, j) for the spans of :class:`Durations`.
5. end of i >= the time that the links of the rank need. They have brought nothing when the iteration starts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step import Step
from megatron_ext.workload.step_order import run_in_order, steps_of_ranks
from megatron_ext.workload.workload import Workload


class Durations(NamedTuple):
    """Lower bounds of times, in microseconds.

    Attributes:
        steps: ``steps[rank][chunk]``: (forward, backward) of one micro-batch.
        gaps: ``gaps[rank][i]``: from the end of step ``i - 1`` of a rank, and from the arrival of the input of its step
            ``i``, to the start of step ``i``.
        spans: ``spans[rank]``: triples ``(i, j, us)``, from the start of step ``i`` of a rank to
            the end of its step ``j``.
    """

    steps: list[list[tuple[float, float]]]
    gaps: list[list[float]]
    spans: list[list[tuple[int, int, float]]] = []

    def step_us(self, rank: int, step: Step) -> float:
        """The least time of one step of a rank."""
        forward, backward = self.steps[rank][step.stage // len(self.steps)]
        return forward if step.kind == "F" else backward


def compute_durations(workload: Workload, timing: Timing) -> Durations:
    """Lower bounds from compute alone: gaps and spans are 0."""
    steps = [[(sum(t.forward), sum(t.backward)) for t in row] for row in timing.layers]
    return Durations(steps, [[0.0] * len(order) for order in steps_of_ranks(workload.parallel)])


Times = list[list[float]]
"""By rank and step index, microseconds."""


def earliest(
    workload: Workload,
    timing: Timing,
    least: Durations,
    by_links: Sequence[Mapping[int, float]] = (),
    *,
    backward: bool = False,
) -> tuple[Times, Times]:
    """The earliest start and end of every step, that is the longest paths to them. Gathers delay a step only as
    ``least`` and ``by_links`` say. With ``backward``, the longest paths from the end and from the start of every step
    to the end of all steps.

    Args:
        by_links: by rank, the earliest end of some of its steps, by step index.
    """
    pp, orders, gaps, spans = workload.parallel.pp, steps_of_ranks(workload.parallel), least.gaps, least.spans
    if backward:
        orders, gaps = [steps[::-1] for steps in orders], [mine[::-1] for mine in gaps]
        spans = [[(len(s) - 1 - j, len(s) - 1 - i, us) for i, j, us in mine] for s, mine in zip(orders, spans)]
    ends: list[list[float]] = [[] for _ in range(pp)]
    begins: list[list[float]] = [[] for _ in range(pp)]
    until: list[dict[int, list[tuple[int, float]]]] = [{} for _ in range(pp)]
    for rank, mine in enumerate(spans):
        for first, last_of, us in mine:
            until[rank].setdefault(last_of, []).append((first, us))
    free = [0.0] * pp  # the time from which the rank may continue

    def run(rank: int, index: int, step: Step, arrival: float) -> float:
        gap = gaps[rank][index]
        begin = max(free[rank], arrival) + (0.0 if backward else gap)
        end = begin + least.step_us(rank, step)
        end = max([end, *(begins[rank][first] + us for first, us in until[rank].get(index, ()))])
        end = max(end, by_links[rank].get(index, 0.0)) if by_links else end
        begins[rank].append(begin)
        ends[rank].append(end)
        free[rank] = end + gap if backward else end
        return free[rank]

    run_in_order(workload.parallel, orders, timing.p2p_us, run, backward=backward)
    return begins, ends


def tails(workload: Workload, timing: Timing, least: Durations) -> Times:
    """By rank and step index: the least time from the start of a step to the end of all steps."""
    return [mine[::-1] for mine in earliest(workload, timing, least, backward=True)[1]]
