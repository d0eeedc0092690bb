"""Page-locked host memory of this process alone, one element larger than requested.

[Note: Why not torch's]
``torch.zeros(..., pin_memory=True)`` rounds every block up to a power of two bytes. Shards, gradients and optimizer
states in host memory would then take up to twice what the memory bill counts. (torch 2.13 can be told not to round,
with ``pinned_max_round_threshold_mb``.) It also takes small pages, which one thread makes. Pages that a device copies
to must not be replaced when the process forks, as data loaders do; :func:`block_pages.private` ensures this.
Source: ATen, ``CachingHostAllocator.h``.

[Note: Why an element more]
A forked process finds zeros there. Before core_v0.17, forked processes write every checkpoint of format torch_dist.
Megatron copies a tensor beforehand only if its storage is larger
(``dist_checkpointing/strategies/filesystem_async.py``, ``_clone_if_needed``).

[Note: Who unlocks]
The last tensor of a block may be freed on any thread, and unlocking waits for the device with the driver's lock held.
So an unused block is only added to a list. The issuing thread unlocks it when it locks the next one, or at the end.
Its memory stays until then: the driver would take whatever is mapped there next for the pages that it has locked.
"""

import mmap
import weakref
from collections import deque

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import block_pages

_unused: deque[tuple[int, mmap.mmap]] = deque()
"""Address and memory of blocks that are not used any more but are still locked."""


def page_locked(numel: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Zeros in memory that ``device`` has page-locked. Raises InputError if there is not enough memory, or the driver
    refuses."""
    unlock_unused(device)
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    whole = torch.frombuffer(memory := _memory(numel + 1, dtype), dtype=dtype)
    pin(whole, memory, device)
    return whole[:numel]


def pin(tensor: torch.Tensor, memory: mmap.mmap, device) -> weakref.finalize:
    """Page-lock ``tensor``, in ``memory``, until its storage is freed or the result is called. Raises InputError."""
    device.pin(tensor)
    unused = weakref.finalize(tensor.untyped_storage(), _unused.append, (tensor.data_ptr(), memory))
    unused.atexit = False
    return unused


def large_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory of the same kind that is not page-locked and that a forked process sees, for example one that
    writes a checkpoint; ``numel`` is above 0. Raises InputError if there is not enough memory."""
    return torch.frombuffer(_memory(numel, dtype, wiped=False), dtype=dtype)


def _memory(numel: int, dtype: torch.dtype, *, wiped: bool = True) -> mmap.mmap:
    try:
        return block_pages.private(numel * dtype.itemsize, wiped=wiped)
    except OSError as error:
        raise InputError(str(error.strerror), field="host memory") from None


def unlock_unused(device) -> None:
    """Unlock the blocks that are not used any more."""
    while _unused:
        device.unpin(_unused[0][0])
        _unused.popleft()
