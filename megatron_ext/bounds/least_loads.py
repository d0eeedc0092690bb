"""The least bytes that any schedule must bring onto a device, at every moment of an iteration."""

from collections.abc import Hashable, Sequence
from math import inf
from typing import NamedTuple

from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Workload


class Need(NamedTuple):
    """What must have arrived at one moment: the layer that starts ``rest_us`` before the end of step ``step`` needs
    ``loaded`` bytes to have come, ``fresh`` of them for the first time."""

    step: int
    rest_us: float
    loaded: float
    fresh: float


def layer_bytes(chunk: Chunk, expert: bool | None = None) -> list[int]:
    """Bytes of each layer of a chunk, without padding. ``expert``: of experts or of other parameters alone."""
    sizes = [0] * chunk.num_layers
    for parameter in chunk.parameters:
        if expert in (None, parameter.expert):
            sizes[parameter.layer] += parameter.bytes
    return sizes


def least_loads(workload: Workload, timing: Timing, pp_rank: int) -> list[Need]:
    """Moments at which a rank must have brought more bytes than before.

    At zero stage 3 at most ``limits.whole_parameter_bytes`` may be whole. Zero stage 1 brings everything once.
    """
    pp, limit = workload.parallel.pp, workload.streamed_bytes
    sizes = [layer_bytes(chunk) for chunk in workload.chunks_of_rank(pp_rank)]
    limit = inf if limit is None or sum(map(sum, sizes)) <= limit else limit
    requests, begun = [], set()
    for index, step in enumerate(steps_of_ranks(workload.parallel)[pp_rank]):
        chunk = step.stage // pp
        if limit == inf and chunk in begun:  # its parameters stay whole
            continue
        begun.add(chunk)
        layers = range(len(sizes[chunk]))
        requests += [
            (index, step.kind, chunk, layer)
            for layer in (layers if step.kind == "F" else reversed(layers))
            if sizes[chunk][layer]
        ]
    loaded, fresh, needs, seen = 0, 0, [], set()
    pages = [((chunk, layer), sizes[chunk][layer]) for _, _, chunk, layer in requests]
    for (index, kind, chunk, layer), missing in zip(requests, missing_bytes(pages, limit)):
        if not missing:
            continue
        if (chunk, layer) not in seen:
            seen.add((chunk, layer))
            fresh += missing
        loaded, times = loaded + missing, timing.layers[pp_rank][chunk]
        rest_us = sum(times.forward[layer:]) if kind == "F" else sum(times.backward[: layer + 1])
        needs.append(Need(index, rest_us, loaded, fresh))
    return needs


def missing_bytes(requests: Sequence[tuple[Hashable, int]], limit: float) -> list[float]:
    """For each request, the bytes that are missing and have to be brought. The cache is empty at first.

    Every byte is its own page of a cache of ``limit`` bytes. A request asks for all bytes of its key. A key always has
    the same number of bytes, at most ``limit``. Freeing the bytes that are needed farthest in the future brings the
    fewest bytes (Belady 1966), for every prefix of the sequence at once. Real schedules move groups, which can only
    bring more.
    """
    coming: dict[Hashable, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        coming.setdefault(requests[number][0], []).append(number)
    next_use = lambda key: coming[key][-1] if coming[key] else inf
    held: dict[Hashable, float] = {}
    free = limit
    found: list[float] = []
    for key, size in requests:
        coming[key].pop()
        missing = size - held.get(key, 0)
        found.append(missing)
        if not missing:
            continue
        held[key] = size
        free -= missing
        while free < 0:  # ends: each turn empties held by one key or brings free to 0
            victim = max((other for other in held if other != key), key=next_use)
            taken = min(held[victim], -free)
            free += taken
            if taken == held[victim]:
                del held[victim]
            else:
                held[victim] -= taken
    return found
