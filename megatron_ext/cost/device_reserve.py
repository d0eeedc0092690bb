"""Bytes that a device holds besides the memory bill. With this reserve, what fits by the bill fits on the device.

[Note: What is besides the bill]
``context_bytes``: the CUDA context and loaded kernels. A maintainer of PyTorch gives "~300 MB" with lazy loading (CUDA
11.7 and later, pytorch/pytorch#107667); users have reported up to 700 (#28113). The larger value is used.

``temporary_bytes``: tensors that kernels allocate and free within a layer. The backward of an MLP has two tensors of
its inner size that were not saved, which is half of what the layer saves. ``library_bytes``: workspaces of cuBLAS and
Transformer Engine. In ten runs of a GPT of 1.6 billion parameters on one H200, with micro-batches of 2,048 to 16,384
tokens, with and without recompute, ``max_memory_allocated`` was 0.07 to 1.05 GB above the bill. With the temporary
tensors, the bill is within 1.2 % of that value, and at most 0.16 GB below, which is attributed to workspaces
(benchmarks/results/gpu.json).

``nccl_bytes``: each communicator has buffers for each channel and neighbour: 10 MiB for all protocols
(NVIDIA/nccl#1685) for the one neighbour from which a ring receives. There are 32 channels between NVLink devices (same
source), and 4 are assumed otherwise. Megatron uses one communicator each for data, tensor, context and pipeline
parallelism, one for tied embeddings, and one for the norm of the whole model. With experts on several ranks there are
three more: among these ranks, among the parts of an expert, and among the ranks that share them.

If ``measure`` has run on a GPU, its table has the bytes that the device held outside of PyTorch's blocks. They replace
``context_bytes`` and ``nccl_bytes``.

``rounding_bytes``: PyTorch's allocator rounds blocks of 10 MiB and more up to 2 MiB (CUDACachingAllocator,
kRoundLarge), which is one MiB on average for each whole group and gradient.

``fragment_bytes``: activations are allocated and freed in sizes that leave gaps. A user's memory summary has 11 % more
reserved than allocated (16,726 and 15,006 MB, pytorch/pytorch#40989). This share is applied to activations only,
because groups are in a pool (runtime/memory_pool.py).
"""

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.hardware_sheet import HardwareSheet
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Workload

CONTEXT_BYTES = 700_000_000
LIBRARY_BYTES = 160_000_000
TEMPORARY = 0.5
"""Share of the bytes that the widest layer saves."""
CONNECTION_BYTES = 10 << 20
NVLINK_CHANNELS, OTHER_CHANNELS = 32, 4
ROUNDING_BYTES = 1 << 20
FRAGMENTS = 16726 / 15006 - 1


def temporary_bytes(workload: Workload) -> int:
    """Bytes that kernels allocate and free within the widest layer; 0 if activations were not counted."""
    layers = (max(*chunk.activation_bytes, 0, chunk.recompute_bytes) for chunk in workload.chunks)
    return int(TEMPORARY * max(layers, default=0))


def reserve_note(workload: Workload) -> str:
    """A text for users who plan within the bytes of a card."""
    fixed, layer = (size / 1e9 for size in (CONTEXT_BYTES + LIBRARY_BYTES, temporary_bytes(workload)))
    return f"beyond the memory bill a device needs {fixed:.1f} GB for CUDA, {layer:.1f} GB in a layer, and NCCL buffers"


def device_reserve(
    sheet: HardwareSheet,
    parallel: Parallel,
    *,
    layers: int,
    activation_bytes: int,
    within_layer: int = 0,
    context_parallel: int = 1,
    table: CostTable | None = None,
) -> int:
    """The reserve of one rank in bytes.

    Args:
        table: measured on the device. Context and NCCL are taken from it, if it has them.
        layers: number of layers of the rank that has most, each of which is a group with a gradient.
        activation_bytes: bytes of activations at their peak.
        within_layer: result of :func:`temporary_bytes`.
    """
    sizes = [parallel.dp, parallel.instances, parallel.tensor_model_parallel_size, parallel.world_size]
    sizes += [parallel.pp, parallel.pp, context_parallel]  # pipeline parallelism, tied embeddings, and context
    sizes += [parallel.ep, parallel.etp, parallel.expert_dp] if parallel.ep > 1 else []
    communicators = len([size for size in sizes if size > 1])
    channels = OTHER_CHANNELS if sheet.nvlink is None else NVLINK_CHANNELS
    measured = None if table is None else table.set_up.beside_allocator_bytes
    beside = measured or CONTEXT_BYTES + communicators * channels * CONNECTION_BYTES
    return beside + LIBRARY_BYTES + within_layer + 2 * layers * ROUNDING_BYTES + int(FRAGMENTS * activation_bytes)
