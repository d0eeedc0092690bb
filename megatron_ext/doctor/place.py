"""Where a rank of the doctor runs, and the options that all its checks are given."""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from megatron_ext.doctor.finding import Finding
from megatron_ext.measure.cluster_launch import everyone_and_node
from megatron_ext.runtime import own_device


class DoctorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Options of one run of the doctor.

    Attributes:
        out: path of the report.
        device: ``cpu`` ignores accelerators even if torch sees them.
        need_bytes: pinned host bytes that a schedule needs on its fullest node; None if no schedule is given.
        nvme: directory on a drive, or None.
        seconds: time for all checks; a check that has not begun by then is not tried.
        check_seconds: time after which a check counts as hanging, and its processes end.
        stacks: a folder for the stacks of ranks that hang, if the process that started them can continue with other
            processes; empty if a launcher started them.
        deadline: the time on this machine's monotonic clock at which ``seconds`` are over; infinite until the first
            ranks have met.
        earlier: findings of the processes before these.
        titles: checks that are left; empty means all.
    """

    out: str
    device: str = "auto"
    need_bytes: int | None = None
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
    """The place of this process, whose default process group exists already. Collective.

    Args:
        use_cuda: every rank has a CUDA device.
        ranks_per_node: ranks that share a node; their numbers are consecutive.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = rank % ranks_per_node
    everyone, exchange = everyone_and_node(ranks_per_node)
    device = own_device.take(local_rank) if use_cuda else torch.device("cpu")
    sharing = own_device.tell_nccl(device, world_size // ranks_per_node) if use_cuda else 1
    return Place(rank, world_size, local_rank, ranks_per_node, device, exchange, everyone, sharing)
