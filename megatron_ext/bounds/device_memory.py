"""The least time that a limit of device memory costs every schedule at zero stage 3, within steps and across them.

[Note: Windows]
Symbols: ``L`` is ``limits.whole_parameter_bytes``. ``a`` and ``b`` are two layers of one rank, ``a`` before ``b``.
``M(a, b)`` is the number of bytes that farthest-in-future freeing (Belady 1966) brings onto an empty device for the
layers from ``a`` to ``b``. No other way to free brings fewer. ``t(n)`` is the least time in which the links bring ``n``
bytes.

1. bytes that are whole or on their way while ``a`` computes, including those of ``a``, <= L.
2. bytes issued after the end of ``a`` and whole at the start of ``b`` >= M(a, b) - L.   (by 1)
3. start of b - end of a >= t(M(a, b) - L).   (by 2)

Within a step no layer is used twice, so there ``M`` is the sum of the layers' bytes. Inequality 3 is an edge of a graph
whose nodes are layers. Compute gives the other edges. Between adjacent layers a tighter bound holds, because parameters
are not divided ([Note: Whole parameters] in ``link_rates.py``). The iteration takes at least the longest path.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from megatron_ext.bounds.critical_path import Durations, compute_durations
from megatron_ext.bounds.least_loads import layer_bytes, missing_bytes
from megatron_ext.bounds.link_rates import LinkRates
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Workload

BringUs = Callable[[int], float]
"""Bytes -> the least microseconds in which they come."""

STEPS_AHEAD = 24
"""The most steps that one window spans. Several windows in a row bound longer spans almost as well."""


def with_device_memory(workload: Workload, timing: Timing, links: Sequence[LinkRates]) -> Durations:
    """Least durations within steps, between adjacent steps, and across several steps; see the note above. ``links``: by
    pipeline rank."""
    least = compute_durations(workload, timing)
    limit = workload.streamed_bytes
    if limit is None:
        return least
    pp = workload.parallel.pp
    steps, gaps, spans = [], [], []
    for rank, order in enumerate(steps_of_ranks(workload.parallel)):
        sizes = [layer_bytes(chunk) for chunk in workload.chunks_of_rank(rank)]
        window = _window_rule(links[rank], limit)
        parameters = [_by_layer(chunk) for chunk in workload.chunks_of_rank(rank)]

        def between(before: int, after: list[int], rank: int = rank) -> float:
            return links[rank].least_wait_us(limit - before, after) if before and after else 0.0

        waits = [_waits(row, between) for row in parameters]
        runs = [
            (list(zip(row, times.forward)), list(zip(row, times.backward))[::-1])
            for row, times in zip(sizes, timing.layers[rank])
        ]
        pairs = zip(runs, waits)
        steps.append([(step_us(run[0], window, wait[0]), step_us(run[1], window, wait[1])) for run, wait in pairs])
        mine = [0.0]
        for one, two in zip(order, order[1:]):
            first, second = sizes[one.stage // pp], sizes[two.stage // pp]
            left = (one.stage, len(first) - 1 if one.kind == "F" else 0)
            right = (two.stage, 0 if two.kind == "F" else len(second) - 1)
            before, after = first[left[1]], second[right[1]]
            if left != right and before and after:
                divided = window(before + after)
                mine.append(max(divided, between(before, parameters[two.stage // pp][right[1]])))
            else:
                mine.append(0.0)
        gaps.append(mine)
        places = [(step.stage // pp, step.kind == "B") for step in order]
        spans.append([*_spans(places, runs, steps[rank], mine, limit, window)])
    return Durations(steps, gaps, spans)


LayerRuns = Sequence[tuple[int, float]]
"""Layers in the order in which a step computes them: (bytes, microseconds alone)."""


def _by_layer(chunk: Chunk) -> list[list[int]]:
    """By layer, the bytes of each of its parameters."""
    found: list[list[int]] = [[] for _ in range(chunk.num_layers)]
    for parameter in chunk.parameters:
        found[parameter.layer].append(parameter.bytes)
    return found


def _waits(layers: list[list[int]], between) -> tuple[list[float], list[float]]:
    """The least time between the end of the previous layer and each layer, for a forward and for a backward."""
    orders = layers, layers[::-1]
    forward, backward = ([0.0, *(between(sum(one), two) for one, two in zip(order, order[1:]))] for order in orders)
    return forward, backward


def step_us(runs: LayerRuns, window: BringUs, waits: Sequence[float] = ()) -> float:
    """The longest path through one step.

    Args:
        window: bytes that layers need together -> least time from the end of the first to the start of the last.
        waits: by layer, in the order of ``runs``, the least time since the end of the layer before it.
    """
    sums = [0, *accumulate(size for size, _ in runs)]
    ends: list[float] = []
    now = 0.0
    for layer, (size, us) in enumerate(runs):
        if size:  # a window ends at a layer that has parameters
            now = max([now, *(end + window(sums[layer + 1] - sums[first]) for first, end in enumerate(ends))])
            if waits and ends:
                now = max(now, ends[-1] + waits[layer])
        now += us
        ends.append(now)
    return now


def _spans(order, runs, least, gaps, limit, window) -> Iterator[tuple[int, int, float]]:
    """Steps ``(i, j, us)`` for which windows give a larger bound than the sum of the steps from ``i`` to ``j``."""
    if sum(size for forward, _ in runs for size, _ in forward) <= limit:
        return
    across = cache(lambda ahead: list(_across(ahead, runs, least, limit, window)))
    for start in range(len(order)):
        plain = least[order[start][0]][order[start][1]]
        for index, us in enumerate(across(tuple(order[start : start + STEPS_AHEAD])), start + 1):
            plain += gaps[index] + least[order[index][0]][order[index][1]]
            if us > plain * (1 + 1e-9):
                yield start, index, us


def _across(ahead, runs, least, limit, window) -> Iterator[float]:
    """The least time from the start of the first step to the end of each later step, by windows that start at the first
    layer of the first step or at its last layer."""
    chunk, backward = ahead[0]
    own = runs[chunk][backward]
    first = _brought(ahead, runs, limit, 0)
    last = _brought(ahead, runs, limit, len(own) - 1)
    for (chunk, backward), by_first, by_last in zip(ahead[1:], first, last):
        rest = list(accumulate((us for _, us in reversed(runs[chunk][backward])), initial=0.0))[:0:-1]
        yield max(
            max(own[0][1] + window(one), least[ahead[0][0]][ahead[0][1]] + window(other)) + after
            for one, other, after in zip(by_first, by_last, rest)
        )


def _brought(ahead, runs, limit, skipped) -> list[list[int]]:
    """By later step and layer, the bytes that are brought before the layer starts. The device is empty before layer
    ``skipped`` of the first step."""
    requests = []
    for index, (chunk, backward) in enumerate(ahead):
        layers = range(len(runs[chunk][backward]))
        for layer, (size, _) in enumerate(runs[chunk][backward]):
            if index or layer >= skipped:
                requests.append((index, (chunk, layers[-1] - layer if backward else layer), size))
    found: list[list[int]] = [[] for _ in ahead]
    missing = missing_bytes([(page, size) for _, page, size in requests], limit)
    for (index, *_), brought in zip(requests, accumulate(missing)):
        found[index].append(brought)
    return found[1:]


def _window_rule(links: LinkRates, limit: int) -> BringUs:
    return cache(lambda needed: links.least_us(needed - limit) if needed > limit and links.routes else 0.0)
