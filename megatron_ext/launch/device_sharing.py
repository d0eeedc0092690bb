"""Ranks that share a device, because their node has fewer GPUs than ranks: which rank takes which device, and the
settings that NCCL needs.

    python -m megatron_ext.launch.device_sharing RANKS

prints one line about it if so many ranks on this node share devices, and nothing otherwise.

[Note: A host for every rank]
NCCL refuses two ranks on one device if they are on one host. ``NCCL_HOSTID`` makes every rank a host of its own, so
ranks communicate through sockets: real streams and collectives over a slow network. Times measured in this way are not
those of a rank with a device to itself, so cost tables and reports say it.
Source: NCCL, ``src/misc/utils.cc`` (getHostHash) and ``src/init.cc``; the variable is read since 2.5.6.
"""

import os
import sys
from collections.abc import Mapping, Sequence

LEAST_NCCL = (2, 5, 6)

MARK = "MEGATRON_EXT_RANKS_PER_DEVICE"
"""Set in the environment of ranks that share devices: how many ranks share the fullest device."""

ONE_NODE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
"""Settings for a run on one node, with which no traffic of the ranks leaves the node."""


def device_index(local_rank: int, devices: int) -> int:
    """The index of the device for a rank of this node that sees ``devices`` devices."""
    return local_rank % devices


def ranks_of_fullest(ranks: int, devices: int) -> int:
    """How many of a node's ranks share the device with the most ranks; 1 without devices."""
    return -(-ranks // devices) if devices else 1


def settings(rank: int, sharing: int, nodes: int = 1) -> dict[str, str]:
    """Environment variables for rank ``rank`` if ``sharing`` ranks share the fullest device; none if that is 1."""
    if sharing < 2:
        return {}
    # With one NVLink domain over several hosts, NCCL would treat the ranks as being on one host again.
    found = {MARK: str(sharing), "NCCL_HOSTID": f"rank{rank}", "NCCL_MNNVL_ENABLE": "0"}
    return found | (ONE_NODE if nodes == 1 else {})


def sharing_here(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share the fullest device, from this rank's environment; 1 if no device is shared."""
    return int(environment.get(MARK, "1"))


def too_old(nccl: Sequence[int | str]) -> str | None:
    """Why this release of NCCL cannot serve ranks that share a device; None if it can."""
    if tuple(nccl[:3]) >= LEAST_NCCL:
        return None
    here, least = (".".join(map(str, version)) for version in (nccl, LEAST_NCCL))
    return f"ranks share a device, which NCCL {here} refuses: use NCCL {least} or newer, or as many GPUs as ranks"


def said(ranks: int, devices: int) -> str:
    """The line that the user reads."""
    return (
        f"{ranks} ranks share {devices} CUDA device{'s' if devices > 1 else ''}: NCCL uses sockets, and times "
        "are not those of a rank with a device of its own"
    )


def visible_devices() -> int:
    """The number of CUDA devices that this process and its children can see. Imports torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main() -> int:
    """Print one line if ranks share devices. The exit code is 2 if NCCL is too old for it."""
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
