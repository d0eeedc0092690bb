"""The hardware and software of this machine, which measured costs depend on."""

import os
import platform

import torch
from torch.cuda import nccl

from megatron_ext.formats.facts import NUMA_NODES, Facts
from megatron_ext.runtime import backends, host_threads
from megatron_ext.runtime.device import has_cuda


def environment(device: str = "auto") -> dict[str, Facts]:
    """``hardware`` and ``software`` of this machine, as a table's metadata stores them.

    Args:
        device: ``cpu`` leaves accelerators out even if torch sees them.
    """
    use_cuda = device != "cpu" and has_cuda()
    hardware: dict[str, str | int | None] = {
        "processor": _processor(),
        "processors": host_threads.processors_before_binding(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        NUMA_NODES: host_threads.numa_nodes(),
        "device": torch.cuda.get_device_name(0) if use_cuda else "cpu",
    }
    software: dict[str, str | int | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "kernel": platform.release(),
        "backend": backends.of_device(use_cuda),
    }
    if use_cuda:
        hardware["devices"] = torch.cuda.device_count()
        software["cuda"] = torch.version.cuda
        software["nccl"] = ".".join(map(str, nccl.version()))
    return {"hardware": hardware, "software": software}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
