"""The device of this rank, which other ranks of its node may share."""

import os
from collections import Counter

import torch
import torch.distributed as dist
from torch.cuda import nccl

from megatron_ext.formats.errors import InputError
from megatron_ext.launch import device_sharing
from megatron_ext.runtime import backends
from megatron_ext.runtime.objects import gather_objects


def take(local_rank: int) -> torch.device:
    """Make the CUDA device of this rank the current one."""
    device = torch.device("cuda", device_sharing.device_index(local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def tell_nccl(device: torch.device, nodes: int = 1) -> int:
    """Set NCCL's environment if ranks share a device, before its first communicator is made. Collective.

    The ranks compare the ids of their devices: ranks that see one device each may still see different ones.

    Args:
        device: the device of this rank; the default process group exists.
        nodes: number of nodes of the run.

    Returns:
        The largest number of ranks that share one device.

    Raises:
        InputError: NCCL cannot serve ranks that share a device. Raised on all ranks.
    """
    # Every group of all ranks connects each rank with every other one. A new one is kept: PyTorch 2.6 may hang where a
    # group is freed right after its use.
    group = None if backends.HOST in dist.get_backend_config() else dist.new_group(backend=backends.HOST)
    devices = gather_objects(str(torch.cuda.get_device_properties(device).uuid), group)
    sharing = max(Counter(devices).values())
    if sharing > 1 and (why := device_sharing.too_old(nccl.version())) is not None:
        raise InputError(why, field="NCCL")
    for name, value in device_sharing.settings(dist.get_rank(), sharing, nodes).items():
        os.environ.setdefault(name, value)
    return sharing
