"""All-gathers by copy engines, through buffers that all ranks have registered with NCCL: do they work here, and how
fast are they compared with ordinary all-gathers? See :mod:`megatron_ext.runtime.routes.symmetric_gather`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import Place
from megatron_ext.formats.errors import one_line
from megatron_ext.measure.fabric import Fabric
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.routes import symmetric_gather as symmetric

NAME = "symmetric buffers"
ELEMENTS = 1 << 24
"""Elements of one rank's shard, in bfloat16: 32 MiB."""

ROUNDS = 10


def check(place: Place, fabric: Fabric) -> list[Finding]:
    """Gather through a symmetric buffer, and without one. Collective."""
    why = symmetric.missing("cuda" if place.on_cuda else "cpu", place.world_size, place.nodes)
    if why is not None:
        return [not_tried(NAME, f"{why}; all-gathers use NCCL's kernels")]
    shard = torch.full((ELEMENTS,), float(place.rank), dtype=torch.bfloat16, device=place.device)
    whole = torch.empty(place.world_size * ELEMENTS, dtype=torch.bfloat16, device=place.device)
    try:
        gather = symmetric_gather(place, whole)
    except (RuntimeError, AttributeError) as error:
        return [not_tried(NAME, one_line(f"refused, so all-gathers use NCCL's kernels: {error}", 300))]
    us = {"symmetric_us": _time(lambda: gather.gather(whole, shard, 0).wait())}
    wrong = [rank for rank in range(place.world_size) if (whole[rank * ELEMENTS :][:ELEMENTS] != rank).any()]
    if wrong:
        return [failed(NAME, f"wrong bytes from ranks {', '.join(map(str, wrong))}", "please send this report")]
    us["plain_us"] = _time(lambda: dist.all_gather_into_tensor(whole, shard, group=fabric.data))
    found = f"{us['symmetric_us']:.0f} us for {whole.nbytes >> 20} MiB, {us['plain_us']:.0f} us with NCCL's kernels"
    return [passed(NAME, found, figures=dict(us))]


def symmetric_gather(place: Place, whole: torch.Tensor) -> symmetric.SymmetricGather:
    """A symmetric gather of ``whole``, with a communicator of its own."""
    group = dist.new_group(backend="nccl", **symmetric.without_thread_blocks(place.device))
    return symmetric.SymmetricGather(group, device_of(whole), {whole.dtype: whole.numel()}, place.everyone)


def _time(gather: Callable[[], object]) -> float:
    """Microseconds per all-gather, over several in a row after a first one."""
    gather()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(ROUNDS):
        gather()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / ROUNDS
