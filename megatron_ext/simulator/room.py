"""What little device memory costs every schedule at zero stage 3: time within steps and across them.

[Note: Windows]
While a layer computes, no more than ``limits.device_bytes`` is whole or on its way, that layer
included; what later layers need beyond that is issued after the layer. So between the end of one
layer and the begin of a later one on the same rank at least the time passes that links need for all that must be
brought in between: what farthest-in-future freeing (Belady 1966) would bring onto an empty device for the layers
from the first to the last, less the limit, which may have been there. Within a step no layer comes twice, so that is the
sum of their bytes less the limit. Every such window is an edge of a graph of layers, compute is the others,
and the pipeline takes no less than the longest path.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from megatron_ext.simulator.critical import Durations, alone
from megatron_ext.simulator.farthest import missing_bytes
from megatron_ext.simulator.least_loads import layer_bytes
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.model import Workload
from megatron_ext.workload.order import steps_of_ranks

BringUs = Callable[[int], float]
"""Bytes -> the least microseconds in which they come."""

STEPS_AHEAD = 24
"""Windows reach over so many steps; longer ones lose little to several of these one after the other."""


def with_room(workload: Workload, timing: Timing, bring_us: Sequence[BringUs | None]) -> Durations:
    """Least durations of steps, between adjacent ones, and across several; see the note above.

    Args:
        bring_us: by pipeline rank; None where nothing is gathered.
    """
    least = alone(workload, timing)
    limit = workload.limits.device_bytes
    if workload.zero_stage == 1 or limit is None:
        return least
    pp = workload.parallel.pp
    steps, gaps, spans = [], [], []
    for rank, order in enumerate(steps_of_ranks(workload.parallel)):
        sizes = [layer_bytes(chunk) for chunk in workload.chunks_of_rank(rank)]
        window = _window_rule(bring_us[rank], limit)
        turns = [(list(zip(row, times.forward)), list(zip(row, times.backward))[::-1]) for row, times in zip(sizes, timing.layers[rank])]
        steps.append([(step_us(forward, window), step_us(backward, window)) for forward, backward in turns])
        mine = [0.0]
        for one, two in zip(order, order[1:]):
            first, second = sizes[one.stage // pp], sizes[two.stage // pp]
            left = (one.stage, len(first) - 1 if one.kind == "F" else 0)
            right = (two.stage, 0 if two.kind == "F" else len(second) - 1)
            before, after = first[left[1]], second[right[1]]
            mine.append(window(before + after) if left != right and before and after else 0.0)
        gaps.append(mine)
        spans.append(list(_spans([(step.stage // pp, step.kind == "B") for step in order], turns, steps[rank], mine, limit, window)))
    return Durations(steps, gaps, spans)


Turns = Sequence[tuple[int, float]]
"""Layers in the order in which they compute: (bytes, microseconds alone)."""


def step_us(turns: Turns, window: BringUs) -> float:
    """The longest path through one step.

    Args:
        window: bytes that layers need together -> least time from the end of the first to the begin of the last.
    """
    sums = [0, *accumulate(size for size, _ in turns)]
    ends: list[float] = []
    now = 0.0
    for layer, (size, us) in enumerate(turns):
        if size:  # a window ends at a layer that needs something
            now = max([now, *(end + window(sums[layer + 1] - sums[first]) for first, end in enumerate(ends))])
        now += us
        ends.append(now)
    return now


def _spans(order, turns, least, gaps, limit, window) -> Iterator[tuple[int, int, float]]:
    """Steps ``(i, j, us)`` between which windows say more than all steps one after the other do."""
    if sum(size for forward, _ in turns for size, _ in forward) <= limit:
        return
    known: dict[tuple, list[float]] = {}
    for start in range(len(order)):
        ahead = tuple(order[start : start + STEPS_AHEAD])
        if ahead not in known:
            known[ahead] = list(_across(ahead, turns, least, limit, window))
        plain = least[order[start][0]][order[start][1]]
        for index, us in enumerate(known[ahead], start + 1):
            plain += gaps[index] + least[order[index][0]][order[index][1]]
            if us > plain * (1 + 1e-9):
                yield start, index, us


def _across(ahead, turns, least, limit, window) -> Iterator[float]:
    """From the begin of the first step to the end of each later one, by windows that begin at the first step's first
    layer or at its last."""
    chunk, backward = ahead[0]
    own = turns[chunk][backward]
    first = _brought(ahead, turns, limit, 0)
    last = _brought(ahead, turns, limit, len(own) - 1)
    for (chunk, backward), by_first, by_last in zip(ahead[1:], first, last):
        rest = list(accumulate((us for _, us in reversed(turns[chunk][backward])), initial=0.0))[:0:-1]
        yield max(
            max(own[0][1] + window(one), least[ahead[0][0]][ahead[0][1]] + window(other)) + after
            for one, other, after in zip(by_first, by_last, rest)
        )


def _brought(ahead, turns, limit, skipped) -> list[list[int]]:
    """By later step and layer, the bytes that are brought until it begins, onto a device that is empty before the
    first step's layer ``skipped``."""
    requests = []
    for index, (chunk, backward) in enumerate(ahead):
        layers = range(len(turns[chunk][backward]))
        for layer, (size, _) in enumerate(turns[chunk][backward]):
            if index or layer >= skipped:
                requests.append((index, (chunk, layers[-1] - layer if backward else layer), size))
    found: list[list[int]] = [[] for _ in ahead]
    missing = missing_bytes([(page, size) for _, page, size in requests], limit)
    for (index, *_), brought in zip(requests, accumulate(missing)):
        found[index].append(brought)
    return found[1:]


def _window_rule(bring_us: BringUs | None, limit: int) -> BringUs:
    known: dict[int, float] = {}

    def window(needed: int) -> float:
        size = needed - limit
        if size <= 0 or bring_us is None:
            return 0.0
        if size not in known:
            known[size] = bring_us(size)
        return known[size]

    return window
