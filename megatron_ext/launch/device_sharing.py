"""Ranks that share a device, because their node has fewer GPUs than ranks: who takes which, and what NCCL is told.

    python -m megatron_ext.launch.device_sharing RANKS

prints the line to be said where so many ranks on this node share devices, and nothing elsewhere.

[Note: A host for every rank]
NCCL refuses two ranks on one device where they are on one host. ``NCCL_HOSTID`` makes every rank a host of its own, so
they talk through sockets: real streams and collectives over a slow network. What is measured so is of no device that
a rank has to itself, so cost tables and reports say it.
Source: NCCL, ``src/misc/utils.cc`` (getHostHash) and ``src/init.cc``; the variable is read since 2.5.6.
"""

import os
import sys
from collections.abc import Mapping, Sequence

LEAST_NCCL = (2, 5, 6)

MARK = "MEGATRON_EXT_RANKS_PER_DEVICE"
"""Set in the environment of ranks that share devices: how many share the fullest."""

ONE_NODE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
"""Where all ranks are on one node, nothing of theirs leaves it."""


def device_index(local_rank: int, devices: int) -> int:
    """The device of a rank of this node that sees so many."""
    return local_rank % devices


def ranks_of_fullest(ranks: int, devices: int) -> int:
    """How many of a node's ranks share the device that has most; 1 without devices."""
    return -(-ranks // devices) if devices else 1


def settings(rank: int, sharing: int, nodes: int = 1) -> dict[str, str]:
    """Variables of rank ``rank`` of the run, where ``sharing`` ranks share the fullest device: none where it is one."""
    if sharing < 2:
        return {}
    # One NVLink domain over several hosts would bring the ranks together again.
    found = {MARK: str(sharing), "NCCL_HOSTID": f"rank{rank}", "NCCL_MNNVL_ENABLE": "0"}
    return found | (ONE_NODE if nodes == 1 else {})


def sharing_here(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share the fullest device, as this rank was told; 1 where none does."""
    return int(environment.get(MARK, "1"))


def too_old(nccl: Sequence[int | str]) -> str | None:
    """Why this release of NCCL cannot serve ranks that share a device; None where it can."""
    if tuple(nccl[:3]) >= LEAST_NCCL:
        return None
    here, least = (".".join(map(str, version)) for version in (nccl, LEAST_NCCL))
    return f"ranks share a device, which NCCL {here} refuses: use {least} or newer, or as many GPUs as ranks"


def said(ranks: int, devices: int) -> str:
    """What people are told."""
    return (
        f"{ranks} ranks share {devices} CUDA device{'s' if devices > 1 else ''}: NCCL goes through sockets, and times "
        "are not those of a rank with a device of its own"
    )


def visible_devices() -> int:
    """CUDA devices that this process, and what it starts, can see. Imports torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main() -> int:
    """One line where ranks share devices. Ends 2 where NCCL is too old for it."""
    ranks, devices = int(sys.argv[1]), visible_devices()
    if ranks_of_fullest(ranks, devices) < 2:
        return 0
    from torch.cuda import nccl

    if (why := too_old(nccl.version())) is not None:
        print(why, file=sys.stderr)
        return 2
    print(said(ranks, devices))
    return 0


if __name__ == "__main__":
    sys.exit(main())
