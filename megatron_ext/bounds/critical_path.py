"""The pipeline without gathers: earliest ends, and what must still follow a step."""

from typing import NamedTuple

from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload


class Durations(NamedTuple):
    """Lower bounds of times, in microseconds.

    Attributes:
        steps: ``steps[rank][chunk]``: (forward, backward) of one micro-batch.
        gaps: ``gaps[rank][i]``: from the end of step ``i - 1`` of a rank to the begin of its step ``i``.
        spans: ``spans[rank]``: triples ``(i, j, us)``, from the begin of step ``i`` of a rank to
            the end of its step ``j``.
    """

    steps: list[list[tuple[float, float]]]
    gaps: list[list[float]]
    spans: list[list[tuple[int, int, float]]] = []


def compute_durations(workload: Workload, timing: Timing) -> Durations:
    """Compute only, with nothing between steps."""
    steps = [[(sum(t.forward), sum(t.backward)) for t in row] for row in timing.layers]
    return Durations(steps, [[0.0] * len(order) for order in steps_of_ranks(workload.parallel)])


def _sweep(workload: Workload, timing: Timing, times, gaps, spans, orders, source_of) -> list[list[float]]:
    """Longest path to the end of every step, each rank's steps taken in the order of ``orders``."""
    pp = workload.parallel.pp
    last = pp * workload.parallel.vp - 1
    ends: list[list[float]] = [[] for _ in range(pp)]
    begins: list[list[float]] = [[] for _ in range(pp)]
    until: list[dict[int, list[tuple[int, float]]]] = [{} for _ in range(pp)]
    for rank, mine in enumerate(spans):
        for first, last_of, us in mine:
            until[rank].setdefault(last_of, []).append((first, us))
    done: dict[tuple, float] = {}
    waiting: dict[tuple, int] = {}
    ready = list(range(pp))
    while ready:
        rank = ready.pop()
        steps, mine = orders[rank], ends[rank]
        while len(mine) < len(steps):
            step = steps[len(mine)]
            stage, kind, microbatch = step
            source = source_of(stage, kind)
            begin = mine[-1] + gaps[rank][len(mine)] if mine else 0.0
            if 0 <= source <= last:
                other = (source, kind, microbatch)
                arrival = done.get(other)
                if arrival is None:
                    waiting[other] = rank
                    break
                begin = max(begin, arrival + (timing.p2p_us if source % pp != rank else 0.0))
            end = begin + times[rank][stage // pp][kind == "B"]
            end = max([end, *(begins[rank][first] + us for first, us in until[rank].get(len(mine), ()))])
            begins[rank].append(begin)
            mine.append(end)
            key = (stage, kind, microbatch)
            done[key] = end
            if key in waiting:
                ready.append(waiting.pop(key))
    return ends


def earliest_ends(workload: Workload, timing: Timing, least: Durations) -> list[list[float]]:
    """By rank and step index: the earliest end if no gather held a step up but as ``least`` says."""
    orders = steps_of_ranks(workload.parallel)
    forward = lambda stage, kind: stage - 1 if kind == "F" else stage + 1
    return _sweep(workload, timing, least.steps, least.gaps, least.spans, orders, forward)


def tails(workload: Workload, timing: Timing, least: Durations) -> list[list[float]]:
    """By rank and step index: the least time from the begin of a step to the end of all steps."""
    orders = [steps[::-1] for steps in steps_of_ranks(workload.parallel)]
    gaps = [[0.0, *mine[:0:-1]] for mine in least.gaps]
    spans = [
        [(len(steps) - 1 - last, len(steps) - 1 - first, us) for first, last, us in mine]
        for steps, mine in zip(orders, least.spans)
    ]
    backward = lambda stage, kind: stage + 1 if kind == "F" else stage - 1
    return [mine[::-1] for mine in _sweep(workload, timing, least.steps, gaps, spans, orders, backward)]
