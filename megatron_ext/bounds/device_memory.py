"""The least time that a limit of device memory costs every schedule at zero stage 3, within steps and between them.

[Note: Windows]
Symbols: ``L`` is ``limits.whole_parameter_bytes``. ``a`` and ``b`` are two layers of one step, ``a`` before ``b``, or
the last layer of a step and the first one of the next step. ``M(a, b)`` is the sum of the bytes of the layers from
``a`` to ``b``, of which none is used twice. ``t(n)`` is the least time in which the links bring ``n`` bytes.

1. bytes that are whole or on their way while ``a`` computes, including those of ``a``, <= L.
2. bytes issued after the end of ``a`` and whole at the start of ``b`` >= M(a, b) - L.   (by 1)
3. start of b - end of a >= t(M(a, b) - L).   (by 2)

Inequality 3 is an edge of a graph whose nodes are layers. Compute gives the other edges. Between adjacent layers a
tighter bound holds, because parameters are not divided ([Note: Whole parameters] in ``link_rates.py``). The iteration
takes at least the longest path.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

from megatron_ext.bounds.critical_path import Durations, compute_durations
from megatron_ext.bounds.least_loads import layer_bytes
from megatron_ext.bounds.link_rates import LinkRates
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Workload

BringUs = Callable[[int], float]
"""Bytes -> the least microseconds in which they come."""


def with_device_memory(workload: Workload, timing: Timing, links: Sequence[LinkRates]) -> Durations:
    """Least durations within steps and between adjacent steps; see the note above. ``links``: by pipeline rank."""
    least = compute_durations(workload, timing)
    limit = workload.streamed_bytes
    if limit is None:
        return least
    pp = workload.parallel.pp
    steps, gaps = [], []
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
    return Durations(steps, gaps)


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


def _window_rule(links: LinkRates, limit: int) -> BringUs:
    return cache(lambda needed: links.least_us(needed - limit) if needed > limit and links.routes else 0.0)
