"""All-gathers by copy engines, into buffers that NCCL knows on every rank (symmetric memory): do they work here, and
how fast are they beside plain ones?

They leave the device's multiprocessors to compute. The ``gpu`` route does not use them yet; this says whether it could,
and what it would gain. NCCL 2.28 or newer, one NVLink domain, a communicator without thread blocks (zero-CTA policy),
and an output buffer of torch's symmetric pool. Elsewhere NCCL takes its usual kernels without a word.
Source: PyTorch, Copy Engine Collectives; NCCL, ncclCommWindowRegister. Not yet run on a GPU.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import Place
from megatron_ext.formats.errors import one_line
from megatron_ext.measure.fabric import Fabric

NAME = "symmetric buffers"
LEAST_NCCL = (2, 28)
ELEMENTS = 1 << 24
"""Of one rank's shard, in bfloat16: 32 MiB."""

ROUNDS = 10


def missing(place: Place) -> str | None:
    """Why copy engines cannot gather here, as far as it can be told before; None: try."""
    if not place.on_cuda:
        return "no CUDA device"
    if place.world_size == 1:
        return "one rank gathers from nobody"
    if place.nodes > 1:
        return "ranks on several nodes: copy engines reach the devices of one NVLink domain"
    if (version := tuple(map(int, nccl.version()))) < LEAST_NCCL:
        return f"NCCL {'.'.join(map(str, version))}: copy engines gather from {'.'.join(map(str, LEAST_NCCL))} on"
    if not hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO"):
        return f"torch {torch.__version__} cannot ask NCCL for a communicator without thread blocks"
    return None


def check(place: Place, fabric: Fabric) -> list[Finding]:
    """Gather into a symmetric buffer, and into a plain one. Collective."""
    why = missing(place)
    if why is not None:
        return [not_tried(NAME, f"{why}; all-gathers take NCCL's kernels")]
    try:
        group, whole = symmetric_buffer(place)
    except (RuntimeError, AttributeError) as error:
        return [not_tried(NAME, one_line(f"refused, all-gathers take NCCL's kernels: {error}", 300))]
    shard = torch.full((ELEMENTS,), float(place.rank), dtype=whole.dtype, device=place.device)
    us = {"symmetric_us": _time(whole, shard, group)}
    wrong = [rank for rank in range(place.world_size) if (whole[rank * ELEMENTS :][:ELEMENTS] != rank).any()]
    if wrong:
        return [failed(NAME, f"wrong bytes of ranks {', '.join(map(str, wrong))}", "please send this report")]
    us["plain_us"] = _time(torch.empty_like(whole), shard, fabric.data)
    found = f"{us['symmetric_us']:.0f} us for {whole.nbytes >> 20} MiB, {us['plain_us']:.0f} us by NCCL's kernels"
    return [passed(NAME, found, figures=dict(us))]


def symmetric_buffer(place: Place) -> tuple[dist.ProcessGroup, torch.Tensor]:
    """A communicator without thread blocks, and a buffer that it knows."""
    # Names that older releases of torch lack: what is missing here is refused by its caller.
    memory: Any = __import__("torch.distributed._symmetric_memory", fromlist=["empty"])
    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options.config.cta_policy = backend.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(backend="nccl", pg_options=options, device_id=place.device)
    assert isinstance(group, dist.ProcessGroup)
    memory.set_backend("NCCL")
    with torch.cuda.use_mem_pool(memory.get_mem_pool(place.device)):
        whole = torch.empty(place.world_size * ELEMENTS, dtype=torch.bfloat16, device=place.device)
    memory.rendezvous(whole, group=group.group_name)
    return group, whole


def _time(whole: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Microseconds of one all-gather, of several in a row behind a first one."""
    dist.all_gather_into_tensor(whole, shard, group=group)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(ROUNDS):
        dist.all_gather_into_tensor(whole, shard, group=group)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / ROUNDS
