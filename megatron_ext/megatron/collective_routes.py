"""The routes of a run that gather from the other ranks: the plain all-gather, its algorithms, and ``cpu_shard``."""

from collections.abc import Mapping
from time import perf_counter_ns
from typing import NamedTuple

import torch.distributed as dist

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import debug
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.routes import Route, symmetric_gather
from megatron_ext.runtime.routes.all_gather import AllGather
from megatron_ext.runtime.routes.buffered_gather import BufferedGather
from megatron_ext.runtime.routes.hierarchical_gather import HierarchicalGather
from megatron_ext.runtime.routes.shard_gather import ShardGather, make_data_group
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC


class CollectiveRoutes(NamedTuple):
    """Of one rank.

    Attributes:
        gather: the plain all-gather.
        by_name: as they are recorded and counted.
        order: counts collectives in debug mode, or None.
        buffered: those that go through buffers; to be closed.
    """

    gather: Route
    by_name: dict[str, Route]
    order: debug.IssueOrder | None
    buffered: list[BufferedGather]


def collective_routes(
    schedules: dict[int, Schedule],
    groups: dict[int, Group],
    process_groups: dict[int, dist.ProcessGroup],
    recorder: Recorder | None,
) -> CollectiveRoutes:
    """Make the routes of this rank's ``groups``; collective. Raises InputError where one cannot be had here.

    Args:
        schedules: by number of micro-batches; they have their groups in common.
        process_groups: Megatron's, by the number of ranks that share a group's shards.
    """
    gathers: dict[int, Route] = {}
    schedule = next(iter(schedules.values()))
    backend = dist.get_backend(next(iter(process_groups.values())))
    made: dict[str, dict[int, BufferedGather]] = {}  # by group
    for ranks in sorted({group.ranks for group in schedule.groups}, reverse=True):
        # Experts have communicators of their own.
        parts = [range(len(schedule.groups)), groups]
        all_of_kind, own = ({index for index in part if schedule.groups[index].ranks == ranks} for part in parts)
        of_kind = _OfKind(schedule, ranks, all_of_kind, {index: groups[index] for index in own}, backend, recorder)
        for name, route in (
            (HIERARCHICAL, _hierarchical(of_kind)),
            (SYMMETRIC, _symmetric(of_kind)),
            ("cpu_shard", _cpu_shard(of_kind, list(schedules.values()))),
        ):
            if route is not None:
                made.setdefault(name, {}).update(dict.fromkeys(own, route))
        gathers |= dict.fromkeys(own, AllGather(process_groups[ranks])) if own else {}
    buffered = list({id(route): route for of_group in made.values() for route in of_group.values()}.values())
    gpu = _by_group(gathers)
    routes: dict[str, Route] = {"gpu": gpu if recorder is None else _RecordedGather(gpu, recorder)}
    routes |= {name: _by_group(of_group) for name, of_group in made.items()}
    if not debug.wanted():
        return CollectiveRoutes(gpu, routes, None, buffered)
    order = debug.IssueOrder()
    counted: dict[str, Route] = {name: debug.OrderedRoute(route, order) for name, route in routes.items()}
    return CollectiveRoutes(debug.OrderedRoute(gpu, order), counted, order, buffered)


class _OfKind(NamedTuple):
    """Groups whose shards as many ranks share: dense ones, or experts.

    Attributes:
        indices: of those of all ranks.
        groups: this rank's.
    """

    schedule: Schedule
    ranks: int
    indices: set[int]
    groups: dict[int, Group]
    backend: str
    recorder: Recorder | None

    def wanted(self, algorithm: str) -> set[int]:
        """Of all ranks, those that ``algorithm`` gathers."""
        return {index for index in self.indices if self.schedule.groups[index].algorithm == algorithm}


class _ByGroup:
    """Each group by a route of its own kind."""

    def __init__(self, routes: Mapping[int, Route]):
        self._routes = routes

    def issue(self, group: Group):
        return self._routes[group.index].issue(group)


def _by_group(routes: Mapping[int, Route]) -> Route:
    kinds = {id(route): route for route in routes.values()}
    return next(iter(kinds.values())) if len(kinds) == 1 else _ByGroup(routes)


def _hierarchical(of_kind: _OfKind) -> BufferedGather | None:
    """The route of this rank's groups that are gathered in two legs; None where it has none.

    Process groups are made by all ranks together as soon as any rank has such a group.
    """
    wanted = of_kind.wanted(HIERARCHICAL)
    if not wanted:
        return None
    node_groups = make_node_groups(of_kind.schedule.parallel, of_kind.backend, of_kind.ranks)
    own = [group for index, group in of_kind.groups.items() if index in wanted]
    assert node_groups is not None  # validation lets such groups pass only where nodes make two legs
    return HierarchicalGather(node_groups, device_of(own[0].whole), of_kind.recorder) if own else None


def _symmetric(of_kind: _OfKind) -> BufferedGather | None:
    """The route of this rank's groups that copy engines gather; None where it has none.

    Process groups are made as :func:`_hierarchical` makes them. Raises InputError where there is no such thing.
    """
    wanted, groups = of_kind.wanted(SYMMETRIC), of_kind.groups
    if not wanted:
        return None
    device, how = next((device_of(group.whole) for group in groups.values()), None), {}
    if device is not None:  # or this rank holds nothing, and gathers nothing
        why = symmetric_gather.missing(device.kind, of_kind.ranks, 1)
        if why is not None:
            raise InputError(f"cannot be done here: {why}", field=f"groups[{min(wanted)}].algorithm", value=SYMMETRIC)
        how = symmetric_gather.without_thread_blocks(device.device)
    data = make_data_group(of_kind.schedule.parallel, of_kind.backend, of_kind.ranks, **how)
    largest: dict = {}
    for whole in (group.whole for index, group in groups.items() if index in wanted):
        largest[whole.dtype] = max(largest.get(whole.dtype, 0), whole.numel())
    return symmetric_gather.SymmetricGather(data, device, largest, of_kind.recorder) if largest else None


def _cpu_shard(of_kind: _OfKind, schedules: list[Schedule]) -> BufferedGather | None:
    """The route of this rank's groups that come by ``cpu_shard``; None where no rank has such a group.

    Process groups are made by all ranks together as soon as any rank has such a group.
    """
    if not any(
        action.route == "cpu_shard" and action.group in of_kind.indices
        for schedule in schedules
        for rank in schedule.ranks
        for entry in (rank.start, *rank.steps)
        for action in entry.unshard
    ):
        return None
    own, groups = make_data_group(of_kind.schedule.parallel, of_kind.backend, of_kind.ranks), of_kind.groups
    return ShardGather(own, device_of(next(iter(groups.values())).whole), of_kind.recorder) if groups else None


class _RecordedGather:
    """The gpu route with its link's busy time recorded."""

    def __init__(self, route, recorder: Recorder):
        self.route, self.recorder = route, recorder

    def issue(self, group):
        start = perf_counter_ns()
        work = self.route.issue(group)
        name = f"unshard {group.index}"
        self.recorder.moved("gather", "network", group.bytes - group.shard.nbytes)
        if group.whole.device.type == "cpu":  # on CUDA a work's future completes when it is queued
            work.get_future().add_done_callback(lambda _: self.recorder.add("gpu", name, start, perf_counter_ns()))
        return work
