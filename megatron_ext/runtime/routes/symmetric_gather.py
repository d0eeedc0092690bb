"""All-gather by copy engines, through memory that all ranks of a node have registered with NCCL (symmetric memory).

[Note: Registered buffers]
Copy engines leave the device's multiprocessors to compute. NCCL uses them for an all-gather if two conditions hold. The
communicator must ask for no thread blocks (zero-CTA policy). Both the send and the receive buffer must lie in windows
that all ranks have registered, at the same offset on each rank. Otherwise NCCL uses its usual kernels without a
message. The caching allocator returns different offsets on each rank, and its blocks come and go. So groups are
gathered in one buffer, which is registered once, and copied from there. The memory bill includes the buffer. The cost
table includes the time of the copies, because ``measure`` gathers with this class.
Source: NCCL, ncclCommWindowRegister and NCCL_CTA_POLICY_ZERO; PyTorch, torch.distributed._symmetric_memory.

Not yet run between GPUs.
"""

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from megatron_ext.formats.errors import one_line
from megatron_ext.launch import device_sharing
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.recorder import NOTHING
from megatron_ext.runtime.routes.buffered_gather import BufferedGather

LEAST_NCCL, LEAST_CUDA = (2, 28), (12, 5)


def missing(kind: str, ranks: int, nodes: int) -> str | None:
    """Why copy engines cannot gather here, as far as it can be told in advance; None: try. The answer is the same on
    all ranks that run the same software.

    Args:
        kind: of the device.
        ranks, nodes: of the process group.
    """
    if kind != "cuda":
        return "no CUDA device"
    if ranks == 1:
        return "there is only one rank, so nothing is gathered"
    if (sharing := device_sharing.sharing_here()) > 1:
        return f"{sharing} ranks share a device, and NCCL registers memory of only one rank per device"
    if nodes != 1:
        return "ranks on several nodes: copy engines reach only devices of one NVLink domain"
    if (version := tuple(nccl.version()[:3])) < LEAST_NCCL:
        return f"NCCL {'.'.join(map(str, version))}: gathers by copy engines need {'.'.join(map(str, LEAST_NCCL))}"
    if (cuda := torch.version.cuda) and tuple(map(int, cuda.split(".")[:2])) < LEAST_CUDA:
        return f"CUDA {cuda}: gathers by copy engines need {'.'.join(map(str, LEAST_CUDA))}"
    if not hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO"):
        return f"torch {torch.__version__} cannot ask NCCL for a communicator without thread blocks"
    try:
        memory = _memory()
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    if not all(hasattr(memory, name) for name in ("empty", "rendezvous", "get_backend", "set_backend")):
        return f"torch {torch.__version__} cannot register memory with NCCL"
    return None


def _memory() -> Any:
    """torch's module. Older releases lack some of its names."""
    return import_module("torch.distributed._symmetric_memory")


def without_thread_blocks(device: torch.device) -> dict[str, Any]:
    """Arguments of ``dist.new_group`` for a communicator that uses copy engines."""
    backend: Any = dist.ProcessGroupNCCL  # older releases of torch lack the names used here
    options = backend.Options(is_high_priority_stream=True)
    options.config.cta_policy = backend.NCCL_CTA_POLICY_ZERO
    return {"pg_options": options, "device_id": device}


class SymmetricGather(BufferedGather):
    """Gathers in registered buffers; made by all ranks of the process group together.

    Args:
        process_group: made with :func:`without_thread_blocks`.
        largest: elements of the largest whole group by dtype; the same on all ranks.
        everyone: process group of the same ranks for exchanging objects; None: the group of all ranks.

    Raises:
        RuntimeError: NCCL or torch refuses. If one rank has not enough memory, raised on all ranks: they would wait for
            it.
    """

    def __init__(self, process_group, device, largest: dict[torch.dtype, int], everyone=None, recorder=NOTHING):
        super().__init__("symmetric", (), device, recorder)  # torch keeps the windows, which keep the communicator
        self.process_group = process_group
        memory, why = _memory(), ""
        try:
            if memory.get_backend(device.device) != "NCCL":
                memory.set_backend("NCCL")
            for dtype in sorted(largest, key=str):
                numel = largest[dtype] + largest[dtype] // dist.get_world_size(process_group)
                self._buffers[dtype] = memory.empty(numel, dtype=dtype, device=device.device)
        except (RuntimeError, AttributeError) as error:
            why = one_line(str(error), 300)
        if why := max(gather_objects(why, everyone)):
            raise RuntimeError(why)
        for buffer in self._buffers.values():
            memory.rendezvous(buffer, group=process_group.group_name)

    def _gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        buffer, numel = self._buffers[whole.dtype], whole.numel()
        received, sent = buffer[:numel], buffer[numel:][: shard.numel()]
        sent.copy_(shard, non_blocking=True)
        dist.all_gather_into_tensor(received, sent, group=self.process_group)
        whole.copy_(received)
