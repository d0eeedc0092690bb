"""Collectives of two communicators in flight at once, issued as a run issues them: do they end with the right bytes
when ranks issue them at different times?

On a GPU the training thread issues all of a run's collectives, in one order on all ranks; see [Note: One order over all
communicators] in routes/__init__.py. This check delays each rank by a different time. Collectives that ranks issue in
different orders never end; the doctor then gives up and reports it. Not yet run on a GPU.
"""

import contextlib
import os
import time

import torch
import torch.distributed as dist

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import Place
from megatron_ext.measure.fabric import Fabric

NAME = "communicators"
ROUNDS = 20
LATE_SECONDS = 0.005
ELEMENTS, MOST_ELEMENTS = 1 << 16, 1 << 22
"""At most so many elements of one rank's shard, and of all shards. All results are kept until the end."""


def check(place: Place, fabric: Fabric) -> list[Finding]:
    """All-gathers by two communicators, delayed on one rank after the other. Collective."""
    if place.world_size == 1:
        return [not_tried(NAME, "there is only one rank, so nothing is gathered")]
    wrong = _wrong(place, fabric)
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    backend = dist.get_backend(fabric.data)
    where = f"{2 * ROUNDS} all-gathers by two {backend} communicators, CUDA_DEVICE_MAX_CONNECTIONS {connections}"
    if wrong:
        return [failed(NAME, f"{where}: {wrong} ended with wrong bytes", "please send this report")]
    return [passed(NAME, f"{where}: all ended with the right bytes")]


def _wrong(place: Place, fabric: Fabric) -> int:
    """The number of all-gathers with wrong bytes, of :data:`ROUNDS` by each communicator in turn."""
    groups = fabric.data, fabric.data_busy
    streams = [torch.cuda.Stream(place.device) if place.on_cuda else None for _ in groups]
    wholes = []
    for number in range(ROUNDS):
        for which, (group, stream) in enumerate(zip(groups, streams)):
            if (number + which) % place.world_size == place.rank:
                time.sleep(LATE_SECONDS)
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                wholes.append((_gather(fabric, group, 2 * number + which), 2 * number + which))
    if place.on_cuda:
        torch.cuda.synchronize(place.device)
    return sum(not torch.equal(whole, _expected(whole, number, place.world_size)) for whole, number in wholes)


def _gather(fabric: Fabric, group: dist.ProcessGroup, number: int) -> torch.Tensor:
    elements = min(ELEMENTS, MOST_ELEMENTS // fabric.world_size)
    whole = torch.zeros(fabric.world_size * elements, device=fabric.torch_device)
    shard = torch.full((elements,), float(1000 * number + fabric.rank), device=fabric.torch_device)
    dist.all_gather_into_tensor(whole, shard, group=group)
    return whole


def _expected(whole: torch.Tensor, number: int, ranks: int) -> torch.Tensor:
    of_ranks = 1000.0 * number + torch.arange(ranks, device=whole.device, dtype=whole.dtype)
    return of_ranks.repeat_interleave(whole.numel() // ranks)
