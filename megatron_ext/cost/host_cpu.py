"""The optional section of a cost table for machines whose ranks compute on shared host processors.

Tables of machines with GPUs do not have it, and nothing that plans for GPUs reads it.
"""

import msgspec

from megatron_ext.formats.checks import Checker


class ProcessorTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processor time ``us`` that one rank's transport of ``size_bytes`` takes."""

    size_bytes: int
    us: float


class HostCpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How the ranks of a node share its processors.

    Attributes:
        processors_per_node: how many ranks' worth of compute a node does at once.
        nodes_sharing: neighbouring nodes that share these processors, where nodes are emulated on one machine.
        processor_us: processor time of transports by curve (``routes.gpu``, ``publish.internode``, ``p2p``, ...),
            sorted by size, as if the rank were alone, like compute.
        compute_rounds: when all ranks computed at once (Unix time in seconds), and how long a micro-batch took them.
    """

    processors_per_node: float
    nodes_sharing: int = 1
    processor_us: dict[str, tuple[ProcessorTime, ...]] = {}
    compute_rounds: tuple[tuple[float, float], ...] = ()


def check_host_cpu(section: HostCpu | None, check: Checker) -> HostCpu | None:
    """Return the section with its points sorted by size.

    Raises:
        InputError: a figure is not positive.
    """
    if section is None:
        return None
    check.positive(section.processors_per_node, "host_cpu.processors_per_node")
    check.at_least(1, section.nodes_sharing, "host_cpu.nodes_sharing")
    for name, points in section.processor_us.items():
        for index, point in enumerate(points):
            field = f"host_cpu.processor_us.{name}[{index}]"
            check.size(point.size_bytes, f"{field}.size_bytes")
            check.duration(point.us, f"{field}.us")
    by_size = {
        name: tuple(sorted(points, key=lambda point: point.size_bytes)) for name, points in section.processor_us.items()
    }
    return msgspec.structs.replace(section, processor_us=by_size)
