"""``python -m megatron_ext.workload.measured_sizes WORKLOAD``: sizes that a measurement must cover.

Prints the bytes of the largest possible group (one chunk), the bytes of whole parameters of the largest rank, and
the bytes of likely groups, separated by commas.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.workload import Parameter, Workload, group_bytes, load, optimizer_bytes

MOST_SIZES = 8
"""Of likely groups."""


def largest_group_bytes(workload: Workload) -> int:
    """Bytes of the largest chunk as one group: nothing larger is gathered at once."""
    parts = [part for chunk in workload.chunks for part in _by_kind(chunk.parameters)]
    return max(512, *(group_bytes(part, workload.parallel) for part in parts))


def _by_kind(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters of experts, and all others separately: they never share a group."""
    for expert in (False, True):
        if part := [parameter for parameter in parameters if parameter.expert is expert]:
            yield part


def largest_rank_bytes(workload: Workload) -> int:
    """Bytes of whole parameters of the pipeline rank that holds most. Experts count as dense parameters whose shards
    are as large."""
    return max(optimizer_bytes(workload, rank) for rank in range(workload.parallel.pp))


def whole_part(workload: Workload) -> float:
    """Bytes of all whole parameters of the rank of :func:`largest_rank_bytes`, divided by those bytes."""
    most = max(range(workload.parallel.pp), key=lambda rank: optimizer_bytes(workload, rank))
    return sum(chunk.bytes for chunk in workload.chunks_of_rank(most)) / max(optimizer_bytes(workload, most), 1)


def parameter_bytes(workload: Workload) -> int:
    """Bytes per element, 2 or 4, of the dtype that holds most bytes of parameters."""
    held = {2: 0, 4: 0}
    for parameter in (parameter for chunk in workload.chunks for parameter in chunk.parameters):
        held[min(max(ITEM_BYTES[parameter.dtype], 2), 4)] += parameter.bytes
    return max(held, key=held.__getitem__)


def likely_group_bytes(workload: Workload) -> list[int]:
    """Sizes that groups will often have: one layer of each kind, and one chunk. Gathers are measured at these sizes as
    well, because a cost read between other sizes may be off: shards that are a power of two apart, as those of weights
    often are, share sets of a processor's caches (megatron_ext/measure/size_grid.py)."""
    found = set()
    for chunk in workload.chunks:
        layers = groupby(chunk.parameters, key=lambda parameter: parameter.layer)
        parts = [chunk.parameters, *(tuple(layer) for _, layer in layers)]
        found |= {group_bytes(kind, workload.parallel) for part in parts for kind in _by_kind(part)}
    return sorted(found)[-MOST_SIZES:]


if __name__ == "__main__":
    work = load(sys.argv[1])
    print(largest_group_bytes(work), largest_rank_bytes(work), ",".join(map(str, likely_group_bytes(work))))
