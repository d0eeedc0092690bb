"""The least bytes that any schedule must bring onto a device, at every moment of an iteration."""

from math import inf
from typing import NamedTuple

from megatron_ext.bounds.belady import missing_bytes
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
