"""Look-ups of host processor time, for the plug-in of :mod:`megatron_ext.simulator.host_processors`."""

from megatron_ext.cost.cost_table import KINDS, CostTable, Point
from megatron_ext.cost.curve import lookup
from megatron_ext.simulator.activity_kinds import CURVES
from megatron_ext.workload.workload import Workload


class ProcessorTimes:
    """Look-ups in the ``host_cpu`` section of a cost table.

    Attributes:
        count: how many ranks' worth of compute a node does at once.
        takes: by kind of activity, whether the section says how much processor time it takes.
    """

    def __init__(self, workload: Workload, table: CostTable):
        assert table.host_cpu is not None
        section = table.host_cpu
        self.parallel = workload.parallel
        self.count, self.nodes_sharing = section.processors_per_node, section.nodes_sharing
        self.curves = {
            name: tuple(Point(size_bytes=point.size_bytes, p50_us=point.us) for point in points)
            for name, points in section.processor_us.items()
            if points
        }
        self._known: dict[tuple[str, int], float] = {}
        self.takes = tuple(self.of_kind(kind, 1) > 0.0 for kind in range(len(KINDS)))

    def machine_of(self, pp_rank: int, dp_rank: int, tp_rank: int = 0) -> int:
        """The machine whose processors a rank uses: its node, except where nodes are emulated."""
        return self.parallel.node_of(pp_rank, dp_rank, tp_rank) // self.nodes_sharing

    def replicas(self, pp_rank: int) -> int:
        """How many ranks of a pipeline rank share the machine of its first replica."""
        machine = self.machine_of(pp_rank, 0)
        return sum(
            self.machine_of(pp_rank, dp, tp) == machine
            for dp in range(self.parallel.dp)
            for tp in range(self.parallel.tensor_model_parallel_size)
        )

    def of_kind(self, kind: int, size_bytes: int) -> float:
        """Processor time in microseconds of one rank's activity of ``kind``."""
        return self.of_curve(CURVES[kind], size_bytes) if kind in CURVES else 0.0

    def of_curve(self, name: str, size_bytes: int) -> float:
        """As :meth:`of_kind` by the name of a curve; beyond its sizes in proportion to the bytes."""
        key = (name, size_bytes)
        if key not in self._known:
            points = self.curves.get(name)
            if points is None:
                self._known[key] = 0.0
            else:
                inside = min(max(size_bytes, points[0].size_bytes), points[-1].size_bytes)
                self._known[key] = lookup(points, inside).us * max(size_bytes / inside, 1.0)
        return self._known[key]

    def of_publish(self, parts: list[tuple[str, int]]) -> float:
        """Processor time of publishing one group: ``parts`` are (curve of ``publish``, bytes)."""
        return sum(self.of_curve(f"publish.{name}", size) for name, size in parts)
