"""What the engine asks of a cost table, looked up once and kept: everything in microseconds."""

from typing import NamedTuple

from megatron_ext.cost.model import CostTable
from megatron_ext.cost.predict import Costs
from megatron_ext.errors import InputError
from megatron_ext.workload.model import Chunk, Workload

KINDS = ("compute", "gpu", "cpu", "nvme", "publish", "p2p", "reduce")
"""Activities that can disturb each other; the names that rows of ``contention`` use."""

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
        self.costs = Costs(table, extrapolate=extrapolate)
        self._lean = lean or {}
        self._beyond = Costs(table, extrapolate=True)
        parallel = workload.parallel
        self.call_us = table.group_overhead.call_us or 0.0
        self.processors = table.topology.processors_per_node
        sends = parallel.pp > 1 and workload.p2p_bytes > 0
        self.p2p_us = self.costs.p2p_us(workload.p2p_bytes) if sends else 0.0
        self.layers = [[self._layer_times(chunk) for chunk in workload.chunks_of_rank(rank)] for rank in range(parallel.pp)]
        self.crosses_nodes = [len({parallel.node_of(rank, dp) for dp in range(parallel.dp)}) for rank in range(parallel.pp)]
        self.has_publish = self.costs.offers_publish("cpu")
        self.left_out = tuple(name for name in ("reduce", "optimizer") if not _has(getattr(table, name)))
        self._excess: dict[tuple[int, int], tuple[float, ...]] = {}
        self._processor_us: dict[tuple[int, int], float] = {}
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

    def processor_us(self, kind: int, size_bytes: int) -> float:
        """Processor time that one rank's transport of ``kind`` takes where compute needs it too; else 0."""
        if self.processors is None or kind not in _CURVES:
            return 0.0
        key = (kind, size_bytes)
        found = self._processor_us.get(key)
        if found is None:
            found = self._processor_us[key] = self._beyond.processor_us(_CURVES[kind], size_bytes) or 0.0
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
        """The same timing with some costs at an end of their interval: by route (or ``publish``),
        ``low_us`` or ``high_us``."""
        return Timing(self.workload, self.table, extrapolate=self.extrapolate, lean=lean)

    def gather_us(self, route: str, size_bytes: int) -> float:
        """One gather of a whole group by ``route``, alone. Raises InputError where it is not measured."""
        return getattr(self._estimate(f"routes.{route}", size_bytes), self._lean.get(route, "us"))

    def _estimate(self, what: str, size_bytes: int):
        """As the table says; a group that only its padding carries past the largest measured size
        is read along the last segment."""
        try:
            return self.costs.estimate(what, size_bytes)
        except InputError:
            smaller = size_bytes - size_bytes // PADDING_SHARE
            if smaller == size_bytes or not self.offers_curve(what):
                raise
            self.costs.estimate(what, smaller)  # measured up to there, or the error stands
            return self._beyond.estimate(what, size_bytes)

    def offers_curve(self, what: str) -> bool:
        curve = self.table
        for name in what.split("."):
            curve = getattr(curve, name)
        return _has(curve)

    def unshard_us(self, route: str, size_bytes: int) -> float:
        """What an unshard occupies its link for: all of the route, or for ``nvme`` its last leg."""
        return self._slot_copy_us(size_bytes) if route == "nvme" else self.gather_us(route, size_bytes)

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
        us = 0.0
        for destination in destinations:
            if self.costs.offers_publish(destination):
                us += self._publish_us(destination, size_bytes)
            elif f"publish.{destination}" not in self.left_out:
                self.left_out += (f"publish.{destination}",)
        nodes = self.crosses_nodes[pp_rank]
        if nodes > 1 and us and self.costs.offers_publish("internode"):
            us += self._publish_us("internode", size_bytes * (nodes - 1) // nodes)
        elif nodes > 1 and us and "publish.internode" not in self.left_out:
            self.left_out += ("publish.internode",)
        return us

    def _publish_us(self, destination: str, size_bytes: int) -> float:
        return getattr(self._estimate(f"publish.{destination}", size_bytes), self._lean.get("publish", "us"))

    def reduce_us(self, size_bytes: int) -> float:
        return self.costs.reduce_us(size_bytes) or 0.0 if size_bytes else 0.0

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

    def _slowdown(self, measured: str, busy: str, size_bytes: int) -> float:
        slowdown = self.costs.slowdown(measured, busy, size_bytes or None)
        if slowdown == 1.0 and self.table.topology.nic_shares_pcie and (measured, busy) in _SHARED_PCIE:
            return 2.0
        return slowdown


_SHARED_PCIE = (("gpu", "cpu"), ("cpu", "gpu"))


def _has(curve) -> bool:
    return curve is not None and (bool(curve.points) or any(curve.algorithms.values()))


def require(timing: Timing, route: str) -> None:
    """Raises InputError where the table does not offer ``route``."""
    if not timing.offers(route):
        raise InputError("has no points, so the route is not offered", field=f"routes.{route}")
