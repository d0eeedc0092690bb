"""Ranks that share a device: NCCL takes two ranks on one device for a mistake only where they claim one host."""

import os

import torch


def share_device() -> None:
    """Take this rank's device, and let NCCL reach the ranks that share it through the loopback interface."""
    rank, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > devices:
        os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % devices)
