"""Exchange Python objects among all ranks of a process group."""

from typing import Any

import torch.distributed as dist


def gather_objects(value: object, process_group=None) -> list[Any]:
    """``value`` of every rank of the process group, in rank order; by default of all ranks. Collective."""
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values
