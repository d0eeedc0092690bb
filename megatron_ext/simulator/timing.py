"""Durations that the engine needs from a cost table, in microseconds. Each is looked up once and kept."""

import contextlib
from functools import cache
from typing import Literal, NamedTuple

from megatron_ext.cost.cost_table import CAST_ON_DEVICE, JOINED, CostTable, Curve, Launches, part_named
from megatron_ext.cost.curve import has_points, points_of
from megatron_ext.cost.environment import INSTANCES
from megatron_ext.cost.estimates import Costs
from megatron_ext.cost.table_views import by_parameter_bytes, table_of_experts
from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.slowdowns import Slowdowns
from megatron_ext.workload.nodes import algorithm_of_nodes, crossing_bytes, nodes_spanned
from megatron_ext.workload.route import ALL_GATHER, HOST_COPY, ON_HOST, SHARD_GATHER, STAGED_COPY, kind_of, shard_pieces
from megatron_ext.workload.workload import Chunk, Workload, expert_ranks

PADDING_SHARE = 64
"""Megatron's padding makes a group larger than its parameters by at most about 1 / PADDING_SHARE."""


class LayerTimes(NamedTuple):
    """Time of every layer of a chunk when it runs alone, by layer number."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


class Timing:
    """Durations of one workload's activities on the machines of one cost table.

    Every duration is the time of the activity when it runs alone; ``slowdowns`` gives what overlapping
    adds. ``left_out`` names the figures that the table, and therefore the prediction, lacks.

    Attributes:
        ranks: the number of ranks that share the shards of the groups. :meth:`among` returns the durations of groups
            with another number.

    Raises:
        InputError: the table has no figure for something that every run needs.
    """

    def __init__(
        self, workload: Workload, table: CostTable, *, extrapolate: bool = False, dense: "Timing | None" = None
    ):
        self.workload, self.table, self.extrapolate = workload, table, extrapolate
        self.ranks = workload.parallel.ranks_of(dense is not None)
        self.costs = Costs(by_parameter_bytes(table, workload), extrapolate=extrapolate)
        parallel, measured = workload.parallel, (table.routes.gpu or Curve()).algorithms
        allowed = [algorithm_of_nodes(parallel, rank, self.ranks) for rank in range(parallel.pp)]
        self._algorithms = [name if name is not None and measured.get(name) else None for name in allowed]
        sends = parallel.pp > 1 and workload.p2p_bytes > 0
        self.p2p_us = self.costs.estimate("p2p", workload.p2p_bytes).us if sends else 0.0
        self.layers = [list(map(self._layer_times, workload.chunks_of_rank(rank))) for rank in range(parallel.pp)]
        self.launches = self._launches()
        """By pipeline rank and chunk, (forward, backward): the time of the training thread to launch it; None without
        launches in the table."""
        self.launch_path_us: float | None = None  # kept by thread_path.py
        own = table.launches or Launches(reduce_us=0.0, tensor_us=0.0)
        self.tensor_us, self.reduce_call_us = own.tensor_us, own.reduce_us
        self.crosses_nodes = [nodes_spanned(parallel, rank, self.ranks) for rank in range(parallel.pp)]
        self.reduces = sorted(points_of(self.costs.table.reduce), key=lambda point: point.size_bytes)
        """Points of the reduce's curve, by bytes of parameters."""
        said = (table.metadata.world_sizes or {}).get(INSTANCES, 1)
        self._apart = 2 if parallel.instances > 1 and said != parallel.instances else 0
        """How many times the reduce of a shard is added to the table's curve: two for the way among instances and
        back."""
        needed = ["reduce", "optimizer", *(["host_step"] if workload.optimizer.on_host else [])]
        missing = [name for name in needed if not has_points(getattr(table, name))]
        self._left_out = missing if dense is None else dense._left_out
        if self._apart and self.ranks == 1:  # the curve was measured without other ranks
            self.leave_out("reduce")
        self.unshard_us, self.issue_us = cache(self._unshard_us), cache(self._issue_us)
        self.slowdowns = Slowdowns(table, self.costs)
        self.experts = self
        """Durations of groups of experts."""
        if dense is None and expert_ranks(workload) not in (None, parallel.dp):
            of_experts = table_of_experts(table, parallel)
            self.experts = Timing(workload, of_experts, extrapolate=extrapolate, dense=self)

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(self._left_out)

    @property
    def kinds(self) -> tuple["Timing", ...]:
        """The durations of dense groups and, if they differ, of experts."""
        return (self,) if self.experts is self else (self, self.experts)

    def among(self, ranks: int) -> "Timing":
        """Durations of groups whose shards ``ranks`` ranks share: the data-parallel or expert-data-parallel ranks."""
        return self if ranks == self.ranks else self.experts

    def _launches(self) -> list[list[tuple[float, float]]] | None:
        chunks = [self.workload.chunks_of_rank(rank) for rank in range(self.workload.parallel.pp)]
        found = [[self.costs.launches_us(c.pp_rank, c.model_chunk_id, c.layer_kinds) for c in own] for own in chunks]
        known = [[us for us in own if us is not None] for own in found]
        return known if known == found else None

    def _layer_times(self, chunk: Chunk) -> LayerTimes:
        rows = self.costs.layer_us(chunk.pp_rank, chunk.model_chunk_id, chunk.layer_kinds, chunk.num_layers)
        return LayerTimes(*zip(*rows))

    def offers(self, route: str) -> bool:
        """Whether the table has times for ``route``.

        It has times for ``cpu_shard`` if both of its parts were measured.
        """
        if not kind_of(route).shard_from_host:
            return self.costs.offers(f"routes.{kind_of(route).curve}")
        return self.offers(ALL_GATHER) and self.offers(HOST_COPY)

    def gather_us(self, route: str, size_bytes: int, algorithm: str | None = None) -> float:
        """One gather of a whole group by ``route``, alone; for route ``gpu``, with ``algorithm``. Raises
        InputError if it is not measured."""
        if algorithm is not None and algorithm not in self._algorithms:
            said = "has no points for this algorithm, or no data-parallel group lies on nodes that allow it"
            raise InputError(said, field=f"routes.{route}.algorithms", value=algorithm)
        return self._estimate(f"routes.{kind_of(route).curve}", size_bytes, algorithm).us

    def algorithm(self, pp_rank: int, size_bytes: int, ranks: int | None = None) -> str | None:
        """The fastest algorithm of route ``gpu`` for a group of this pipeline rank that ``ranks`` ranks share; None for
        one all-gather."""
        if ranks not in (None, self.ranks):
            return self.experts.algorithm(pp_rank, size_bytes)
        other = self._algorithms[pp_rank]
        if other is None:
            return None
        times: dict[str | None, float] = {}
        for algorithm in (None, other):
            # Not measured at this size. If no algorithm is, the gather raises the error.
            with contextlib.suppress(InputError):
                times[algorithm] = self.gather_us(ALL_GATHER, size_bytes, algorithm)
        return min(times, key=lambda name: times[name], default=None)

    def fastest_us(self, route: str, size_bytes: int) -> float:
        """:meth:`gather_us` by the fastest algorithm of any pipeline rank."""
        ranks = [self._algorithms.index(name) for name in {*self._algorithms} - {None}]
        if not kind_of(route).needs_device_shard or not ranks:
            return self.gather_us(route, size_bytes)
        return min(self.gather_us(route, size_bytes, self.algorithm(rank, size_bytes)) for rank in ranks)

    def _estimate(self, what: str, size_bytes: int, algorithm: str | None = None):
        """The table's estimate. If only padding makes a group larger than the largest measured size, the last
        segment is extended."""
        try:
            return self.costs.estimate(what, size_bytes, algorithm)
        except InputError:
            smaller = size_bytes - size_bytes // PADDING_SHARE
            if smaller == size_bytes or not self.offers_curve(what):
                raise
            self.costs.estimate(what, smaller, algorithm)  # raises if the size without padding is not measured either
            return self.costs.estimate(what, size_bytes, algorithm, beyond=True)

    def _beyond_us(self, what: str, size_bytes: int, algorithm: str | None = None) -> float:
        """The table's estimate. Outside the measured sizes, the nearest segment is extended."""
        return self.costs.estimate(what, size_bytes, algorithm, beyond=True).us

    def offers_curve(self, what: str) -> bool:
        """Whether ``routes.gpu``, ``reduce``, ... of the table can be looked up."""
        return has_points(part_named(self.table, what))

    def _issue_us(self, route: str, size_bytes: int) -> float:
        """Microseconds for which issuing a gather keeps the training thread. For a host copy, and for the copy of a
        staged group from its slot, it is the measured time of issuing; for an all-gather, or if that was not measured,
        ``call_us``."""
        own = self.costs.issued_us(HOST_COPY, size_bytes) if not kind_of(route).needs_device_shard else None
        return (self.table.group_overhead.call_us or 0.0) if own is None else own

    def shard_copy_us(self, size_bytes: int) -> float:
        """Microseconds of the first part of ``cpu_shard``: copying the own shard of a group of ``size_bytes`` over the
        link of host copies. A shard smaller than the smallest copy measured takes as long as that copy."""
        least = min((point.size_bytes for point in points_of(self.table.routes.cpu)), default=0)
        return self.gather_us(HOST_COPY, max(size_bytes // self.ranks, least))

    def _shard_gather_us(self, size_bytes: int) -> float:
        """Microseconds of the second part of ``cpu_shard``: the all-gathers of all pieces. It includes any time that
        the measured route takes beyond both parts; all pieces but one are copied and gathered at the same time. A group
        with one rank is not gathered."""
        if self.ranks == 1:
            return 0.0
        gather_us, pieces = self.gather_us(ALL_GATHER, size_bytes), shard_pieces(size_bytes, self.ranks)
        if pieces > 1:
            with contextlib.suppress(InputError):  # a piece is smaller than measured: use the bytes alone
                gather_us = max(gather_us, pieces * self.gather_us(ALL_GATHER, size_bytes // pieces))
        if not self.offers_curve(f"routes.{SHARD_GATHER}"):
            return gather_us
        copy_us, both_us = self.shard_copy_us(size_bytes), self.gather_us(SHARD_GATHER, size_bytes)
        rest_us = both_us - copy_us / pieces  # if gathering takes longer than copying
        if rest_us < copy_us and pieces > 1:
            rest_us = pieces * (both_us - copy_us)
        return max(rest_us, gather_us)

    def _unshard_us(self, route: str, size_bytes: int, algorithm: str | None = None) -> float:
        """Microseconds for which an unshard occupies its link; for ``nvme`` and ``cpu_shard`` only the last leg."""
        kind = kind_of(route)
        if kind.shard_from_host:
            return self._shard_gather_us(size_bytes)
        if kind.staged:
            return self._slot_copy_us(size_bytes)
        return self.gather_us(route, size_bytes, algorithm if kind.needs_device_shard else None)

    def stage_us(self, size_bytes: int) -> float:
        """Microseconds of the drive's part of route ``nvme``. The curve of the route is the whole way to the device."""
        return max(self.gather_us(STAGED_COPY, size_bytes) - self._slot_copy_us(size_bytes), 0.0)

    def _slot_copy_us(self, size_bytes: int) -> float:
        # A staging slot is pinned host memory like the host copy, so the copy from it takes the same time.
        if self.offers(HOST_COPY):
            return self.gather_us(HOST_COPY, size_bytes)
        self.leave_out("routes.cpu")
        return 0.0

    def publish_us(self, pp_rank: int, destinations, size_bytes: int) -> float:
        """Microseconds until the group's fresh bytes lie at ``destinations`` (``cpu``, ``nvme``) on every node.

        Between nodes each byte crosses the network once per node that lacks it. A missing ``publish.internode`` curve
        is named in ``left_out``; planning refuses such a table.
        """
        parts, nodes = [], self.crosses_nodes[pp_rank]
        for destination in destinations:
            if self.offers_curve(f"publish.{destination}"):
                # Each node's ranks write the whole group to the node's drive; the curve has their own shards.
                parts.append((destination, size_bytes, 1 if destination == ON_HOST else nodes))
            else:
                self.leave_out(f"publish.{destination}")
        if nodes > 1 and parts and self.offers_curve("publish.internode"):
            parts.append(("internode", crossing_bytes(size_bytes, nodes), 1))
        elif nodes > 1 and parts:
            self.leave_out("publish.internode")
        return sum(self._estimate(f"publish.{name}", part).us * times for name, part, times in parts)

    def reduce_us(self, size_bytes: int) -> float:
        """Microseconds of reducing one group's gradients; 0 without such a curve. A group smaller than the smallest
        measured size takes as long as that size. If the table was measured without the optimizer's instances, their
        all-reduce is taken to be as long as two reduces of the shard, which move as many bytes."""
        if not size_bytes or not self.reduces:
            return 0.0
        sizes = (size_bytes, *[size_bytes // self.ranks] * self._apart)
        return sum(self._estimate("reduce", max(size, self.reduces[0].size_bytes)).us for size in sizes)

    def to_host_us(self, size_bytes: int) -> tuple[float, float]:
        """Microseconds of copying the own shard of a gradient of ``size_bytes`` to host memory, and of adding it there.

        The copy takes as long as publishing the shard to the host copy. If publishing was not measured, it takes as
        long as a copy from host memory (:meth:`shard_to_host_us`). Missing curves are named in ``left_out``.
        """
        shard, copy_us = size_bytes // self.ranks, self.shard_to_host_us(size_bytes)
        if has_points(self.table.host_add):
            return copy_us, self._beyond_us("host_add", shard)
        self.leave_out("host_add")
        return copy_us, 0.0

    def shard_to_host_us(self, size_bytes: int) -> float:
        """Microseconds of copying the own shard of ``size_bytes`` to host memory."""
        if self.offers_curve("publish.cpu"):
            return self._beyond_us("publish.cpu", size_bytes)
        return self._shard_from_host_us(size_bytes)

    def from_host_us(self, size_bytes: int) -> float:
        """Microseconds of copying the own shard of a group's gradients from host memory to the device. ``size_bytes``
        is the size of the whole group of 16-bit parameters."""
        return self._shard_from_host_us(size_bytes * self.workload.optimizer.gradient_item_bytes // 2)

    def _shard_from_host_us(self, size_bytes: int) -> float:
        if self.offers(HOST_COPY):
            return self._beyond_us("routes.cpu", size_bytes // self.ranks)
        self.leave_out("routes.cpu")
        return 0.0

    def leave_out(self, name: str) -> None:
        """Add the name of a missing figure to ``left_out``, once."""
        if name not in self._left_out:
            self._left_out.append(name)

    @property
    def least_reduce_us(self) -> float:
        """The least microseconds that reducing any group takes."""
        return min((point.p50_us for own in self.kinds for point in own.reduces), default=0.0)

    def optimizer_us(self, size_bytes: int) -> float:
        """Microseconds of an optimizer step on ``size_bytes`` of parameters; 0 without such a curve."""
        there = size_bytes and self.offers_curve("optimizer")
        return self.costs.estimate("optimizer", size_bytes).us if there else 0.0

    @property
    def offers_host_step(self) -> bool:
        """Whether the table has times for the host's step of one group and for the copy of its states before it."""
        return all(map(has_points, (self.table.host_step, self.table.host_add, self.table.optimizer)))

    def knows_host_step(self) -> bool:
        """:attr:`offers_host_step` for a schedule that needs it. Missing curves are named in ``left_out``."""
        for name in ("host_step", "host_add"):
            if not has_points(getattr(self.table, name)):
                self.leave_out(name)
        return self.offers_host_step

    @property
    def offers_device_step(self) -> bool:
        """Whether the table has times for a group's step on the host and on the device, and for the whole step."""
        return all(map(has_points, (self.table.host_step, self.table.device_step, self.table.optimizer)))

    def host_step_us(self, size_bytes: int, cast: Literal["host", "device"] = "host") -> float:
        """Microseconds of the run's own host step of a group of ``size_bytes``, alone. Beyond the measured sizes the
        time is proportional to the bytes.

        Args:
            cast: where new parameters become 16-bit. If that was not measured, the time of Megatron's step is used.
        """
        way = CAST_ON_DEVICE if cast == "device" else JOINED
        ways = (self.table.host_step or Curve()).algorithms
        if way not in ways:
            self.leave_out(f"host_step.algorithms.{way}")
        return self._beyond_us("host_step", size_bytes, way if ways.get(way) else None)

    def own_host_step_us(self, size_bytes: int) -> float:
        """Microseconds of the same step as Megatron makes it. It is a part of :meth:`optimizer_us`."""
        return self._beyond_us("host_step", size_bytes)

    def device_step_us(self, size_bytes: int) -> float:
        """Microseconds of the device's step of a group of ``size_bytes`` with optimizer states on the device, alone.
        Beyond the measured sizes the time is proportional to the bytes."""
        return self._beyond_us("device_step", size_bytes)

    def saved_states_us(self, size_bytes: int) -> float:
        """Microseconds of copying the states (float32 parameters and moments) of a group of ``size_bytes`` of 16-bit
        parameters in host memory. A copy moves as many bytes as an addition in place, because written cache lines are
        read first."""
        tensors = 1 + len(self.workload.optimizer.moment_dtypes)
        return tensors * self._beyond_us("host_add", 2 * size_bytes // self.ranks)

    def states_us(self, size_bytes: int, slot_bytes: int) -> float:
        """Microseconds of reading and writing ``size_bytes`` of optimizer states on the drive, in pieces of
        ``slot_bytes``.

        Reads and writes share the drive, so their times add up. Reading a piece takes as long as staging in a whole
        group of that size. Writing a piece takes as long as publishing a group ``ranks`` times as large, of which it is
        one shard. A piece of a size that was not measured has the rate of the nearest measured size. Reads or writes
        that were not measured are left out and named in ``left_out``.
        """
        if not size_bytes:
            return 0.0
        total, write_us = 0.0, lambda size: self._estimate("publish.nvme", size).us
        read_us = lambda size: self.stage_us(size) or self.gather_us(STAGED_COPY, size)  # if the copy is as slow
        for what, curve, ranks, alone_us in (
            ("routes.nvme", self.table.routes.nvme, 1, read_us),
            ("publish.nvme", self.table.publish.nvme, self.ranks, write_us),
        ):
            sizes = [point.size_bytes for point in points_of(curve)]
            if curve is self.table.routes.nvme and self.offers(HOST_COPY):  # sizes whose copy can be subtracted
                last = points_of(self.table.routes.cpu)[-1].size_bytes
                sizes = [size for size in sizes if size <= last] or sizes[:1]
            if not sizes:
                self.leave_out(what)
                continue
            size = min(max(slot_bytes * ranks, min(sizes)), max(sizes))
            total += size_bytes * ranks / size * alone_us(size)
        return total


def require_route(timing: Timing, route: str) -> None:
    """Raise InputError if the table does not offer ``route``."""
    if not timing.offers(route):
        raise InputError("has no points, so the route is not offered", field=f"routes.{route}")
