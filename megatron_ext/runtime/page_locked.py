"""Page-locked host memory of this process alone, of exactly the size that was asked for.

[Note: Why not torch's]
``torch.zeros(..., pin_memory=True)`` rounds every block up to a power of two bytes, so shards, gradients and optimizer
states in host memory would take up to twice what the memory bill counts (torch 2.13 can be told not to, by
``pinned_max_round_threshold_mb``). The mapping is shared, although nobody else has it: pages that a device copies to
must stay the same when the process forks, as data loaders do.
Source: ATen, ``CachingHostAllocator.h``.
"""

import mmap
import sys
from collections.abc import Callable

import torch


class Memory(mmap.mmap):
    """Unlocked when the last tensor in it is gone."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():  # at the end of the process the driver does it
            self.unlock()


def page_locked(numel: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Zeros in memory that ``device`` has page-locked.

    Raises:
        RuntimeError: the driver refuses.
    """
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    memory = Memory(-1, numel * dtype.itemsize)
    tensor = torch.frombuffer(memory, dtype=dtype)
    device.pin(tensor)
    address = tensor.data_ptr()
    memory.unlock = lambda: device.unlock(address)
    return tensor
