"""Which CPU cores this rank's threads run on, and how many threads make pages, add gradients and step on the host.

[Note: Processors of a rank]
A rank with a GPU is bound to the cores next to it (its NUMA node), and so are the pages that it makes, unless it was
bound already: the other socket's memory is farther, and the link between sockets is slower. The cores that a rank may
use are divided among the ranks that share them.
Launchers set OMP_NUM_THREADS=1, which would leave one core to move tens of gigabytes per iteration. Sums and steps
work element by element, so the number of threads changes no result.
Source: the kernel's documentation of sysfs (``numa_node`` of PCI devices, ``devices/system/node``).
"""

import contextlib
import os
from pathlib import Path

import torch

from megatron_ext.runtime import cgroups
from megatron_ext.runtime.system_files import text_of

before_binding: list[int] = []
""":func:`processors`, before each :func:`bind`."""

SYSTEM = Path("/sys")
THREADS = Path("/proc/self/task")


def numbers(text: str) -> list[int]:
    """The numbers in a list in the kernel's format: ``0-2,8`` means 0, 1, 2 and 8."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [number for low, _, high in ends for number in range(int(low), int(high or low) + 1)]


def processors(ranks: int = 1, of_node: int = 1) -> int:
    """How many cores this process may use: those it is bound to, or its share of its cgroups' CPU quota if that is
    less. ``ranks`` of the node's ``of_node`` ranks run on these cores, and all ``of_node`` share the quota."""
    own, every = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    given = cgroups.processor_quota(every)
    return own if given == every else min(own, max(given * ranks // of_node, 1))


def processors_before_binding() -> int:
    """:func:`processors` of this process as it was started, before :func:`bind`."""
    return (*before_binding, processors())[0]


def share() -> int:
    """Threads that this rank may use, by the launcher's LOCAL_WORLD_SIZE, before it knows how many ranks share them."""
    return max(processors() // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), 1)


def numa_nodes() -> int:
    """Number of NUMA nodes of the machine; 1 if the system does not say."""
    return max(len(numbers(text_of(SYSTEM / "devices/system/node/online"))), 1)


def numa_node(device: torch.device) -> int | None:
    """The NUMA node of a GPU; None if there is only one, or the system does not say."""
    gpu = torch.cuda.get_device_properties(device)
    if numa_nodes() < 2:
        return None
    try:
        bus = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((SYSTEM / "bus/pci/devices" / bus / "numa_node").read_text())
    except (AttributeError, OSError):  # an older torch does not give the bus
        return None
    return node if node >= 0 else None


def bind(node: int | None) -> None:
    """Bind all threads of this process to the cores of a NUMA node, if the process may use any of them."""
    if node is None:
        return
    before_binding.append(processors())
    with contextlib.suppress(OSError):
        own = os.sched_getaffinity(0) & {*numbers((SYSTEM / f"devices/system/node/node{node}/cpulist").read_text())}
        for thread in THREADS.iterdir() if own else ():
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread.name), own)


def of_rank(ranks: int, of_node: int) -> int:
    """Threads of each rank that add gradients and step. ``ranks`` share these cores; the node has ``of_node`` ranks."""
    threads = max(processors(ranks, of_node) // ranks, 1)
    return threads - threads // 8  # the rest is for the threads that issue, read and publish


def use(ranks: int, of_node: int) -> list[str]:
    """Let torch use this rank's share of the cores, if torch would use fewer threads, or more than there are cores for:
    OMP_NUM_THREADS may be a share of cores to which the ranks are not bound. Call it before threads are started.

    Args:
        ranks: number of this node's ranks that run on the same cores.
        of_node: number of all ranks of this node.

    Returns:
        What was changed or what is missing, one line each.
    """
    own, before = processors(ranks, of_node), torch.get_num_threads()
    lines, threads, most = [], of_rank(ranks, of_node), max(own // ranks, 1)
    if own < ranks:
        lines.append(
            f"{ranks} ranks share {own} processors: adding gradients and stepping on the host takes up to "
            f"{ranks / own:.1f} times as long as with one processor for each rank"
        )
    if before < threads or before > most:
        torch.set_num_threads(threads)
        lines.append(
            f"the host adds gradients and steps with {threads} threads per rank, not with {before} as torch would by "
            f"itself or by OMP_NUM_THREADS: each rank has {most} of the processors"
        )
    return lines
