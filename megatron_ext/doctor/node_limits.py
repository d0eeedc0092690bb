"""Limits of this node that concern host copies: locked memory, host memory, cgroups, /dev/shm."""

import os
import resource
from pathlib import Path

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.runtime import free_host_memory

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 1 << 30
"""Least size of /dev/shm for NCCL and the data loaders of several ranks. Docker's default is 64 MiB."""

CONTAINER = "in a container: docker run --ipc=host --ulimit memlock=-1"


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """Compare what this node allows with what the plan needs."""
    return [
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], place.on_cuda, options),
        host(free_host_memory.available_bytes(), options),
        shared(SHARED_MEMORY, place.ranks_per_node),
    ]


def locked_memory(limit: int, on_cuda: bool, options: DoctorOptions) -> Finding:
    """The limit of locked memory (``ulimit -l``), in bytes; ``resource.RLIM_INFINITY`` means no limit.

    NVIDIA's driver page-locks memory beyond it (os-mlock.c of its open kernel modules), so a small limit is no failure.
    Whether memory can be page-locked is tried by shared_pinning.py.
    """
    name = "locked memory"
    if limit == resource.RLIM_INFINITY:
        return passed(name, "no limit")
    found = f"limit {mib(limit)}"
    if not on_cuda:
        return not_tried(name, f"{found}; without a CUDA device nothing is page-locked")
    if options.need_bytes is None:
        return passed(name, f"{found}; it is not known how much a plan needs", "give --schedule")
    found += f", the schedule needs {mib(options.need_bytes)}"
    small = f"if pinning fails: ulimit -l unlimited; {CONTAINER}; under Slurm: PropagateResourceLimits"
    return passed(name, found, small if options.need_bytes > limit else "")


def host(available: int | None, options: DoctorOptions) -> Finding:
    """Bytes of host memory that are still free in this machine, or in the cgroup."""
    name = "host memory"
    if available is None:
        return not_tried(name, "the system does not say how much is free")
    found = f"{mib(available)} free in the machine and its cgroup"
    if options.need_bytes is None:
        return passed(name, found, figures={"available_bytes": available})
    found += f", the schedule needs {mib(options.need_bytes)} per node"
    if options.need_bytes > available:
        return failed(name, found, "describe with --limit-pinned-host-bytes, or raise the container's memory limit")
    return passed(name, found, figures={"available_bytes": available})


def shared(place: Path, ranks: int) -> Finding:
    """The size of /dev/shm, which NCCL and data loaders use; host copies do not."""
    name = "/dev/shm"
    try:
        status = os.statvfs(place)
    except OSError as error:
        return not_tried(name, f"{place}: {error.strerror}")
    size = status.f_blocks * status.f_frsize
    figures: dict[str, float | str] = {"size_bytes": size}
    if ranks > 1 and size < LEAST_SHARED_BYTES:
        return failed(name, f"{mib(size)} for {ranks} ranks", f"{CONTAINER}, or --shm-size 16g", figures)
    return passed(name, mib(size), figures=figures)


def mib(size: int) -> str:
    """``size`` in bytes as readable text."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
