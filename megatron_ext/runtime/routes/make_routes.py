"""The routes of training by name, and how each is made on a rank.

A route that reads published copies is in :data:`READERS`; a route that gathers shards is in :data:`GATHERERS`. What
planning needs to know about a route is in :mod:`megatron_ext.workload.route`; docs/architecture.md says how to add one.
"""

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import debug
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.node_groups import make_data_group, make_node_groups
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.routes import Route, symmetric_gather
from megatron_ext.runtime.routes.all_gather import AllGather
from megatron_ext.runtime.routes.buffered_gather import BufferedGather
from megatron_ext.runtime.routes.drive_copy import DriveCopy
from megatron_ext.runtime.routes.hierarchical_gather import HierarchicalGather
from megatron_ext.runtime.routes.host_copy import CopyRoute, HostCopy
from megatron_ext.runtime.routes.shard_gather import ShardGather
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC

READERS: dict[str, Callable[[NodeCopies], CopyRoute]] = {"cpu": HostCopy, "nvme": DriveCopy}


class OfKind(NamedTuple):
    """Groups whose shards are shared by the same number of ranks: dense groups, or experts.

    Attributes:
        schedules: those of all numbers of micro-batches; they have the same groups.
        ranks: number of ranks that share a group's shards.
        indices: indices of such groups on all ranks.
        groups: this rank's groups.
        backend: backend of the process groups.
        shared: Megatron's process group of the ranks that share this rank's shards; None if this rank has no groups.
    """

    schedules: list[Schedule]
    ranks: int
    indices: set[int]
    groups: dict[int, RankGroup]
    backend: str
    recorder: Recorder
    shared: Any

    def wanted(self, name: str) -> set[int]:
        """Indices of the groups, on all ranks, that use the route ``name`` or the algorithm ``name`` of a route."""
        planned, unshards = self.schedules[0].groups, [one for schedule in self.schedules for one in schedule.unshards]
        by_name = {one.group for one in unshards if (planned[one.group].algorithm_by(one.route) or one.route) == name}
        return by_name & self.indices


# All ranks together make process groups as soon as any rank has a group that uses them. Each of these functions
# returns the route of this rank's groups ``own``, or None if it has none.


def _hierarchical(of: OfKind, own: list[RankGroup]) -> BufferedGather | None:
    node_groups = make_node_groups(of.schedules[0].parallel, of.backend, of.ranks)
    assert node_groups is not None  # validation accepts such groups only if the nodes allow two legs
    return HierarchicalGather(node_groups, device_of(own[0].whole), of.recorder) if own else None


def _symmetric(of: OfKind, own: list[RankGroup]) -> BufferedGather | None:
    device: Any = next((device_of(group.whole) for group in of.groups.values()), None)
    how = {}
    if device is not None:  # otherwise this rank holds no groups, and gathers nothing
        why = symmetric_gather.missing(device.kind, of.ranks, 1)
        if why is not None:
            first = min(index for index in of.indices if of.schedules[0].groups[index].algorithm == SYMMETRIC)
            raise InputError(f"not possible here: {why}", field=f"groups[{first}].algorithm", value=SYMMETRIC)
        how = symmetric_gather.without_thread_blocks(device.device)
    data = make_data_group(of.schedules[0].parallel, of.backend, of.ranks, **how)
    largest = {whole.dtype: whole.numel() for whole in sorted((group.whole for group in own), key=torch.numel)}
    return symmetric_gather.SymmetricGather(data, device, largest, of.shared, of.recorder) if largest else None


def _shard_gather(of: OfKind, own: list[RankGroup]) -> BufferedGather | None:
    data = make_data_group(of.schedules[0].parallel, of.backend, of.ranks) if of.ranks > 1 else None
    return ShardGather(data, device_of(own[0].whole), of.recorder) if own else None


GATHERERS: dict[str, Callable[[OfKind, list[RankGroup]], BufferedGather | None]] = {
    HIERARCHICAL: _hierarchical,
    SYMMETRIC: _symmetric,
    "cpu_shard": _shard_gather,
}
"""Makers of the routes, and of the algorithms of ``gpu``, besides the plain all-gather. They raise InputError if one is
unavailable here."""


class CollectiveRoutes(NamedTuple):
    """The collective routes of one rank.

    Attributes:
        gather: the plain all-gather.
        by_name: the routes, with recording and counting.
        order: counts collectives in debug mode, or None.
        buffered: the routes with buffers, each with its groups; the caller closes them.
    """

    gather: Route
    by_name: dict[str, Route]
    order: debug.IssueOrder | None
    buffered: dict[BufferedGather, list[RankGroup]]


def collective_routes(
    schedules: dict[int, Schedule],
    groups: dict[int, RankGroup],
    process_groups: dict[int, dist.ProcessGroup],
    recorder: Recorder,
) -> CollectiveRoutes:
    """Make the routes of this rank's ``groups``; collective. Raises InputError if one is unavailable here.

    Args:
        schedules: by number of micro-batches; they have the same groups.
        process_groups: Megatron's process groups, by the number of ranks that share a group's shards.
    """
    gathers: dict[int, Route] = {}
    schedule = next(iter(schedules.values()))
    backend = dist.get_backend(next(iter(process_groups.values())))
    made: dict[str, dict[int, BufferedGather]] = {}  # by group
    buffered: dict[BufferedGather, list[RankGroup]] = {}
    for ranks in sorted({group.ranks for group in schedule.groups}, reverse=True):
        # Experts have their own communicators.
        parts = [range(len(schedule.groups)), groups]
        all_of_kind, own = ({index for index in part if schedule.groups[index].ranks == ranks} for part in parts)
        how = (all_of_kind, {index: groups[index] for index in own}, backend, recorder)
        of_kind = OfKind([*schedules.values()], ranks, *how, process_groups.get(ranks))
        for name, make in GATHERERS.items():
            wanted = of_kind.wanted(name)
            gathered = [group for index, group in of_kind.groups.items() if index in wanted]
            if wanted and (route := make(of_kind, gathered)) is not None:
                made.setdefault(name, {}).update(dict.fromkeys(own, route))
                buffered[route] = gathered
        gathers |= dict.fromkeys(own, AllGather(process_groups[ranks])) if own else {}
    gpu = _by_group(gathers)
    routes: dict[str, Route] = {"gpu": gpu if recorder is NOTHING else _RecordedGather(gpu, recorder)}
    routes |= {name: _by_group(of_group) for name, of_group in made.items()}
    if not debug.wanted():
        return CollectiveRoutes(gpu, routes, None, buffered)
    order = debug.IssueOrder()
    counted: dict[str, Route] = {name: debug.OrderedRoute(route, order) for name, route in routes.items()}
    return CollectiveRoutes(debug.OrderedRoute(gpu, order), counted, order, buffered)


class _ByGroup:
    """Uses the route of each group's kind."""

    def __init__(self, routes: Mapping[int, Route]):
        self._routes = routes

    def issue(self, group: RankGroup):
        return self._routes[group.index].issue(group)


def _by_group(routes: Mapping[int, Route]) -> Route:
    kinds = {id(route): route for route in routes.values()}
    return next(iter(kinds.values())) if len(kinds) == 1 else _ByGroup(routes)


class _RecordedGather:
    """The gpu route with its link's busy time recorded."""

    def __init__(self, route, recorder: Recorder):
        self.route, self.recorder = route, recorder

    def issue(self, group):
        start = perf_counter_ns()
        work = self.route.issue(group)
        self.recorder.moved("gather", "network", group.bytes - group.shard.nbytes)
        self.recorder.add_end("gpu", f"unshard {group.index}", start, work)
        return work
