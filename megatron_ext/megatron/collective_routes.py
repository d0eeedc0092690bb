"""The routes of a run that gather from the other ranks: the plain all-gather, its algorithms, and ``cpu_shard``."""

from collections.abc import Mapping
from time import perf_counter_ns
from typing import NamedTuple

import torch.distributed as dist

from megatron_ext.runtime import debug
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.routes import Route
from megatron_ext.runtime.routes.all_gather import AllGather
from megatron_ext.runtime.routes.buffered_gather import BufferedGather
from megatron_ext.runtime.routes.makers import GATHERERS, OfKind
from megatron_ext.schedule.user_defined_schedule import Schedule


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
    recorder: Recorder,
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
        how = (all_of_kind, {index: groups[index] for index in own}, backend, recorder)
        of_kind = OfKind([*schedules.values()], ranks, *how, process_groups.get(ranks))
        for name, make in GATHERERS.items():
            route = make(of_kind)
            if route is not None:
                made.setdefault(name, {}).update(dict.fromkeys(own, route))
        gathers |= dict.fromkeys(own, AllGather(process_groups[ranks])) if own else {}
    buffered = list({id(route): route for of_group in made.values() for route in of_group.values()}.values())
    gpu = _by_group(gathers)
    routes: dict[str, Route] = {"gpu": gpu if recorder is NOTHING else _RecordedGather(gpu, recorder)}
    routes |= {name: _by_group(of_group) for name, of_group in made.items()}
    if not debug.wanted():
        return CollectiveRoutes(gpu, routes, None, buffered)
    order = debug.IssueOrder()
    counted: dict[str, Route] = {name: debug.OrderedRoute(route, order) for name, route in routes.items()}
    return CollectiveRoutes(debug.OrderedRoute(gpu, order), counted, order, buffered)


class _ByGroup:
    """Each group by a route of its own kind."""

    def __init__(self, routes: Mapping[int, Route]):
        self._routes = routes

    def issue(self, group: Group):
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
