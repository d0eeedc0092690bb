"""Where a rank of the doctor is, and what all its checks are given."""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from megatron_ext.doctor.finding import Finding
from megatron_ext.measure.cluster_launch import everyone_and_node
from megatron_ext.runtime import own_device


class DoctorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run of the doctor is asked for.

    Attributes:
        out: path of the report.
        device: ``cpu`` leaves accelerators out even where torch sees them.
        need_bytes: pinned host bytes that a plan needs on its fullest node; None where no plan is given.
        need_of: what needs them.
        nvme: directory on a drive, or None.
        seconds: for all checks; what has not begun then is not tried.
        check_seconds: after so long a check counts as hanging, and its processes end.
        stacks: a folder for the stacks of ranks that hang, where whoever started them goes on with other processes;
            empty where a launcher did.
        deadline: by this machine's monotonic clock, when ``seconds`` are over.
        earlier: what processes before these have found.
        titles: checks that are left; empty is all.
    """

    out: str
    device: str = "auto"
    need_bytes: int | None = None
    need_of: str = ""
    nvme: str | None = None
    seconds: float = 120.0
    check_seconds: float = 30.0
    stacks: str = ""
    deadline: float = math.inf
    earlier: tuple[Finding, ...] = ()
    titles: tuple[str, ...] = ()


class Place(NamedTuple):
    """One rank.

    Attributes:
        exchange: collective ``exchange(object) -> list`` over the ranks of this node.
        everyone: process group of all ranks for objects.
        ranks_per_device: ranks that share the fullest device.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device
    exchange: Callable[[object], list]
    everyone: dist.ProcessGroup
    ranks_per_device: int = 1

    @property
    def on_cuda(self) -> bool:
        """Whether this rank has a CUDA device."""
        return self.device.type == "cuda"

    @property
    def nodes(self) -> int:
        """Nodes of the run."""
        return self.world_size // self.ranks_per_node


def find_place(use_cuda: bool, ranks_per_node: int) -> Place:
    """The place of this process, whose default process group is there. Collective.

    Args:
        use_cuda: every rank has a CUDA device.
        ranks_per_node: ranks that share a node; neighbours by rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = rank % ranks_per_node
    everyone, exchange = everyone_and_node(ranks_per_node)
    device = own_device.take(local_rank) if use_cuda else torch.device("cpu")
    sharing = own_device.tell_nccl(device, world_size // ranks_per_node) if use_cuda else 1
    return Place(rank, world_size, local_rank, ranks_per_node, device, exchange, everyone, sharing)
