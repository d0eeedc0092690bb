"""Pass: which parameters travel together. Chunks are cut into blocks of layers, and blocks into groups."""

from collections.abc import Iterator, Sequence

from megatron_ext.planner.blocks import Blocks, Divide, cut_by_layer, cut_evenly, cut_within, make_blocks
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Parameter, Workload


def cut_groups(workload: Workload, timing: Timing, cut: Sequence[Sequence[int]], divide: Divide | None) -> Blocks:
    """Blocks of layers that begin at ``cut[stage]``, with their parameters divided into groups."""
    return make_blocks(workload, cut, divide, timing.algorithm)


def fits(workload: Workload, blocks: Blocks) -> bool:
    """Whether every block fits on its device."""
    limit = workload.limits.whole_parameter_bytes
    if limit is None:
        return True
    if workload.zero_stage == 3:
        return all(block.bytes <= limit for block in blocks.blocks)
    totals = [0] * workload.parallel.pp
    for group in blocks.groups:
        totals[group.pp_rank] += group.bytes
    return max(totals) <= limit


PARTS_OF_LIMIT = (1, 2, 3, 4)
"""If device memory is limited, blocks are also tried that are the limit divided by each of these numbers."""


def cuttings(workload: Workload) -> Iterator[list[list[int]]]:
    """Ways to cut all chunks into blocks, without repetitions.

    These ways are tried: whole chunks; 2, 4, ... parts of about equal bytes; one block per layer; the fewest blocks
    that fit the limit of device memory or a part of it; and the first chunk by layer and the others whole, which starts
    the first compute early with few calls. Every workload that fits at all fits with one block per layer.
    """
    deepest = max(chunk.num_layers for chunk in workload.chunks)
    limit = workload.streamed_bytes
    chunks = workload.chunks
    found = [[cut_evenly(chunk, 2**n) for chunk in chunks] for n in range((deepest - 1).bit_length())]
    found.append([cut_by_layer(chunk) for chunk in chunks])
    if limit is not None and deepest > 1:
        found += [[cut_within(workload, chunk, limit / part) for chunk in chunks] for part in PARTS_OF_LIMIT]
    if deepest > 1:
        found.append([cut_by_layer(chunk) if chunk.model_chunk_id == 0 else [0] for chunk in chunks])
    for index, cut in enumerate(found):
        if cut not in found[:index]:
            yield cut


def by_parameter(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Groups of one large parameter each, and one group of all small parameters. So a part of a layer can stay on the
    device or have a host copy. A parameter is large if it has at least 1/16 of the bytes of all."""
    threshold = sum(p.bytes for p in parameters) / 16
    large = [[p] for p in parameters if p.bytes >= threshold]
    small = [p for p in parameters if p.bytes < threshold]
    return large + ([small] if small else [])


def halves(divide: Divide | None, parameters: list[Parameter]) -> list[list[Parameter]]:
    """The groups of ``divide``, or one group of all parameters, each cut into two of about equal bytes."""
    found = []
    for part in [parameters] if divide is None else divide(parameters):
        whole = sum(p.bytes for p in part)
        ends = range(1, len(part))
        middle = min(ends, key=lambda end: abs(2 * sum(p.bytes for p in part[:end]) - whole), default=0)
        found += [half for half in (part[:middle], part[middle:]) if half]
    return found
