"""What the engine asks of a cost table, looked up once and kept: everything in microseconds."""

from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.curve import curves_of
from megatron_ext.cost.model import KINDS, CostTable
from megatron_ext.cost.predict import Costs
from megatron_ext.errors import InputError
from megatron_ext.workload.model import Chunk, Workload
from megatron_ext.workload.nodes import crossing_bytes, has_hierarchy
from megatron_ext.workload.route import HIERARCHICAL

PADDING_SHARE = 64
"""Megatron's padding makes a group at most about this fraction larger than its parameters."""

COMPUTE, GPU, CPU, NVME, PUBLISH, P2P, REDUCE = range(len(KINDS))

_CURVES = {GPU: "routes.gpu", CPU: "routes.cpu", NVME: "routes.nvme", PUBLISH: "publish.cpu", P2P: "p2p", REDUCE: "reduce"}


class LayerTimes(NamedTuple):
    """Alone-time of every layer of a chunk, by layer number."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


class Timing:
    """Durations of one workload's activities on the machines of one cost table.

    Every duration is what the activity takes alone; :meth:`excess` says what overlapping
    adds. ``left_out`` names what the table cannot say and the prediction therefore lacks.

    Raises:
        InputError: the table has no figure for something that every run needs.
    """

    def __init__(
        self, workload: Workload, table: CostTable, *, extrapolate: bool = False, lean: dict[str, str] | None = None
    ):
        self.workload, self.table, self.extrapolate = workload, table, extrapolate
        flat, hierarchical = _by_algorithm(table)
        self.costs = Costs(flat, extrapolate=extrapolate)
        self._lean = lean or {}
        self._beyond = Costs(flat, extrapolate=True)
        parallel = workload.parallel
        self._hierarchy = [hierarchical is not None and has_hierarchy(parallel, rank) for rank in range(parallel.pp)]
        self._hierarchical = (Costs(hierarchical, extrapolate=extrapolate), Costs(hierarchical, extrapolate=True)) if any(self._hierarchy) else None
        self.processors = table.topology.processors_per_node
        self._nodes_sharing = table.topology.nodes_sharing or 1
        sends = parallel.pp > 1 and workload.p2p_bytes > 0
        self.p2p_us = self.costs.p2p_us(workload.p2p_bytes) if sends else 0.0
        self.layers = [[self._layer_times(chunk) for chunk in workload.chunks_of_rank(rank)] for rank in range(parallel.pp)]
        self.crosses_nodes = [len({parallel.node_of(rank, dp) for dp in range(parallel.dp)}) for rank in range(parallel.pp)]
        self.has_publish = self.costs.offers_publish("cpu")
        self._reduce = sorted((p for points in curves_of(table.reduce or ()).values() for p in points), key=lambda p: p.size_bytes)
        self.left_out = tuple(name for name in ("reduce", "optimizer") if not _has(getattr(table, name)))
        self._excess: dict[tuple[int, int], tuple[float, ...]] = {}
        self._processor_us: dict[tuple[str, int], float] = {}
        rows = {(row.measured, row.busy) for row in table.contention if row.slowdown > 1.0}
        if table.topology.nic_shares_pcie:
            rows |= {(a, b) for a, b in _SHARED_PCIE}
        self._pairs = [[(measured, busy) in rows for busy in KINDS] for measured in KINDS]
        self.takes_processor = tuple(self.processor_us(kind, 1) > 0.0 for kind in range(len(KINDS)))
        """By kind: whether the table says how much processor time it takes from compute. Rows of
        compute beside it then say the same once more and are passed over."""
        for kind, takes in enumerate(self.takes_processor):
            if takes:
                self._pairs[COMPUTE][kind] = False
        self.disturbed = tuple(any(pairs) for pairs in self._pairs)
        """By kind: whether anything slows it at all, so that undisturbed kinds cost no look-ups."""
        self.disturbs = tuple(any(pairs[kind] for pairs in self._pairs) for kind in range(len(KINDS)))

    def machine_of(self, pp_rank: int, dp_rank: int, tp_rank: int = 0) -> int:
        """The machine whose processors a rank uses: its node, but where nodes are emulated."""
        return self.workload.parallel.node_of(pp_rank, dp_rank, tp_rank) // self._nodes_sharing

    def processor_us(self, kind: int, size_bytes: int) -> float:
        """Processor time that one rank's transport of ``kind`` takes where compute needs it too; else 0."""
        return self.curve_processor_us(_CURVES[kind], size_bytes) if kind in _CURVES else 0.0

    def curve_processor_us(self, what: str, size_bytes: int) -> float:
        """:meth:`processor_us` of one curve: ``routes.gpu``, ``publish.internode``, ..."""
        if self.processors is None:
            return 0.0
        found = self._processor_us.get((what, size_bytes))
        if found is None:
            found = self._processor_us[what, size_bytes] = self._beyond.processor_us(what, size_bytes) or 0.0
        return found

    def disturbs_kind(self, measured: int, busy: int) -> bool:
        """Whether ``busy`` slows ``measured`` by a row of ``contention``."""
        return self._pairs[measured][busy]

    def _layer_times(self, chunk: Chunk) -> LayerTimes:
        rows = self.costs.layer_us(chunk.pp_rank, chunk.model_chunk_id, chunk.layer_kinds, chunk.num_layers)
        return LayerTimes(tuple(row[0] for row in rows), tuple(row[1] for row in rows))

    def offers(self, route: str) -> bool:
        """Whether the table has measured ``route``."""
        return self.costs.offers(route)

    def leaning(self, lean: dict[str, str]) -> "Timing":
        """The same timing with some costs at an end of their interval: by route (or ``publish``, or an algorithm
        of ``gpu``, which otherwise goes with it), ``low_us`` or ``high_us``."""
        return Timing(self.workload, self.table, extrapolate=self.extrapolate, lean=lean)

    def gather_us(self, route: str, size_bytes: int, algorithm: str | None = None) -> float:
        """One gather of a whole group by ``route``, alone; by ``gpu``, with ``algorithm``. Raises
        InputError where it is not measured."""
        costs = self._hierarchical if algorithm == HIERARCHICAL else None
        if algorithm is not None and costs is None:
            raise InputError("has no points for it, or the data-parallel groups have no hierarchy", field=f"routes.{route}.algorithms", value=algorithm)
        end = self._lean.get(route, "us")
        return getattr(self._estimate(f"routes.{route}", size_bytes, costs), self._lean.get(algorithm, end) if algorithm else end)

    def algorithm(self, pp_rank: int, size_bytes: int) -> str | None:
        """The fastest way a group of this pipeline rank can go by ``gpu``; None: one all-gather."""
        if not self._hierarchy[pp_rank]:
            return None
        times = {}
        for algorithm in (None, HIERARCHICAL):
            try:
                times[algorithm] = self.gather_us("gpu", size_bytes, algorithm)
            except InputError:  # measured for other sizes; where for none, the error comes with the gather
                pass
        return min(times, key=times.get, default=None)

    def fastest_us(self, route: str, size_bytes: int) -> float:
        """:meth:`gather_us` by the fastest algorithm of any pipeline rank."""
        if route != "gpu" or self._hierarchical is None:
            return self.gather_us(route, size_bytes)
        return self.gather_us(route, size_bytes, self.algorithm(self._hierarchy.index(True), size_bytes))

    def _estimate(self, what: str, size_bytes: int, costs: tuple[Costs, Costs] | None = None):
        """As the table says; a group that only its padding carries past the largest measured size
        is read along the last segment."""
        measured, beyond = costs or (self.costs, self._beyond)
        try:
            return measured.estimate(what, size_bytes)
        except InputError:
            smaller = size_bytes - size_bytes // PADDING_SHARE
            if smaller == size_bytes or not self.offers_curve(what):
                raise
            measured.estimate(what, smaller)  # measured up to there, or the error stands
            return beyond.estimate(what, size_bytes)

    def offers_curve(self, what: str) -> bool:
        return _has(self.curve(what))

    def curve(self, what: str):
        """``routes.gpu``, ``reduce``, ... of the table; None where it has none."""
        found = self.table
        for name in what.split("."):
            found = getattr(found, name)
        return found

    def issue_us(self, route: str, size_bytes: int) -> float:
        """How long issuing a gather keeps the training thread: a host copy, and a staged group's way from
        its slot, as it was measured by itself; an all-gather, and what was not told apart, ``call_us``."""
        own = self.costs.issued_us("cpu", size_bytes) if route != "gpu" else None
        return (self.table.group_overhead.call_us or 0.0) if own is None else own

    def unshard_us(self, route: str, size_bytes: int, algorithm: str | None = None) -> float:
        """What an unshard occupies its link for: all of the route, or for ``nvme`` its last leg."""
        return self._slot_copy_us(size_bytes) if route == "nvme" else self.gather_us(route, size_bytes, algorithm if route == "gpu" else None)

    def stage_us(self, size_bytes: int) -> float:
        """The drive's part of the ``nvme`` route, whose curve is the whole way to the device."""
        return max(self.gather_us("nvme", size_bytes) - self._slot_copy_us(size_bytes), 0.0)

    def _slot_copy_us(self, size_bytes: int) -> float:
        # A staging slot is pinned host memory, as the host copy is: the same copy from there.
        return self.gather_us("cpu", size_bytes) if self.offers("cpu") else 0.0

    def publish_us(self, pp_rank: int, destinations, size_bytes: int) -> float:
        """Until the group's fresh bytes lie at ``destinations`` (``cpu``, ``nvme``) on every node.

        Between nodes each byte crosses the network once per node: a node sends for what it
        lacks. Where the table has no ``publish.internode`` curve that is left out, and said so.
        """
        return sum(self._publish_us(name, part) for name, part in self._publish_parts(pp_rank, destinations, size_bytes))

    def publish_processor_us(self, pp_rank: int, destinations, size_bytes: int) -> float:
        """Processor time that one rank's part of :meth:`publish_us` takes, between nodes as well."""
        return sum(self.curve_processor_us(f"publish.{name}", part) for name, part in self._publish_parts(pp_rank, destinations, size_bytes))

    def _publish_parts(self, pp_rank: int, destinations, size_bytes: int) -> list[tuple[str, int]]:
        """(curve of ``publish``, bytes), one after the other."""
        parts = []
        for destination in destinations:
            if self.costs.offers_publish(destination):
                parts.append((destination, size_bytes))
            elif f"publish.{destination}" not in self.left_out:
                self.left_out += (f"publish.{destination}",)
        nodes = self.crosses_nodes[pp_rank]
        if nodes > 1 and parts and self.costs.offers_publish("internode"):
            parts.append(("internode", crossing_bytes(size_bytes, nodes)))
        elif nodes > 1 and parts and "publish.internode" not in self.left_out:
            self.left_out += ("publish.internode",)
        return parts

    def _publish_us(self, destination: str, size_bytes: int) -> float:
        return getattr(self._estimate(f"publish.{destination}", size_bytes), self._lean.get("publish", "us"))

    def reduce_us(self, size_bytes: int) -> float:
        """Reducing one group's gradients; 0 where the table lacks it. A group smaller than any that
        was measured takes as long as that."""
        if not size_bytes or not self._reduce:
            return 0.0
        return self._estimate("reduce", max(size_bytes, self._reduce[0].size_bytes)).us

    @property
    def least_reduce_us(self) -> float:
        """What reducing any group takes at least."""
        return min((point.p50_us for point in self._reduce), default=0.0)

    def optimizer_us(self, size_bytes: int) -> float:
        return self.costs.optimizer_us(size_bytes) or 0.0 if size_bytes else 0.0

    def excess(self, kind: int, size_bytes: int) -> tuple[float, ...]:
        """By busy kind: the share by which an activity of ``kind`` takes longer beside it.

        Shares add up over busy kinds, which is exact for one fairly shared link. A NIC on
        the PCIe link of the host copies is such a link: two transfers at once take twice as
        long each, unless the pair was measured.
        """
        key = (kind, size_bytes)
        found = self._excess.get(key)
        if found is None:
            found = self._excess[key] = tuple(
                self._slowdown(KINDS[kind], busy, size_bytes) - 1.0 if there else 0.0
                for busy, there in zip(KINDS, self._pairs[kind])
            )
        return found

    def least_excess(self, measured: int, busy: int) -> float:
        """The least that any row says of this pair; 0 where nothing was measured."""
        if not self.disturbs_kind(measured, busy):
            return 0.0
        names = (KINDS[measured], KINDS[busy])
        rows = [row.slowdown for row in self.table.contention if (row.measured, row.busy) == names]
        if not rows:
            return self.excess(measured, 0)[busy]
        return max(min(rows) - 1.0, 0.0)

    def _slowdown(self, measured: str, busy: str, size_bytes: int) -> float:
        slowdown = self.costs.slowdown(measured, busy, size_bytes or None)
        if slowdown == 1.0 and self.table.topology.nic_shares_pcie and (measured, busy) in _SHARED_PCIE:
            return 2.0
        return slowdown


_SHARED_PCIE = (("gpu", "cpu"), ("cpu", "gpu"))


def _by_algorithm(table: CostTable) -> tuple[CostTable, CostTable | None]:
    """The table without its hierarchical all-gathers, and one with these alone (None: it has none)."""
    gpu = table.routes.gpu
    points = gpu.algorithms.get(HIERARCHICAL, ()) if gpu is not None else ()
    if not points:
        return table, None
    rest = {name: other for name, other in gpu.algorithms.items() if name != HIERARCHICAL}
    curves = replace(gpu, algorithms=rest), replace(gpu, points=points, algorithms={})
    flat, hierarchical = (replace(table, routes=replace(table.routes, gpu=curve)) for curve in curves)
    return flat, hierarchical


def _has(curve) -> bool:
    return curve is not None and (bool(curve.points) or any(curve.algorithms.values()))


def require(timing: Timing, route: str) -> None:
    """Raises InputError where the table does not offer ``route``."""
    if not timing.offers(route):
        raise InputError("has no points, so the route is not offered", field=f"routes.{route}")
