"""Which layers of its chunk use a group. This needs the workload; the schedule alone does not know."""

from collections.abc import Iterable

from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.workload import Workload


def uses_of_groups(groups: Iterable[Group], workload: Workload) -> list[tuple[int, int]]:
    """First and last layer of its chunk that use each group."""
    layers: dict[tuple[int, int, str], tuple[int, ...]] = {}
    for chunk in workload.chunks:
        for parameter in chunk.parameters:
            layers[chunk.pp_rank, chunk.model_chunk_id, parameter.name] = parameter.uses
    found = []
    for group in groups:
        uses = [layer for name in group.parameters for layer in layers[group.pp_rank, group.model_chunk_id, name]]
        found.append((min(uses), max(uses)))
    return found
