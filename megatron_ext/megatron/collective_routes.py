"""The routes of a run that gather from the other ranks: the plain all-gather, its algorithms, and ``cpu_shard``."""

from time import perf_counter_ns
from typing import NamedTuple

import torch.distributed as dist

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import debug
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.faults import Faults
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
    schedule: Schedule, groups: dict[int, Group], process_group, faults: Faults, recorder: Recorder | None
) -> CollectiveRoutes:
    """Make the routes of this rank's ``groups``; collective. Raises InputError where one cannot be had here."""
    buffers: dict[str, BufferedGather | None] = {
        HIERARCHICAL: _hierarchical(schedule, groups, process_group, recorder),
        SYMMETRIC: _symmetric(schedule, groups, process_group, recorder),
        "cpu_shard": _cpu_shard(schedule, groups, process_group, faults, recorder),
    }
    buffered = {name: route for name, route in buffers.items() if route}
    gpu: Route = AllGather(process_group)
    routes: dict[str, Route] = {"gpu": gpu if recorder is None else _RecordedGather(gpu, recorder)}
    routes |= buffered
    if not debug.wanted():
        return CollectiveRoutes(gpu, routes, None, list(buffered.values()))
    order = debug.IssueOrder()
    counted: dict[str, Route] = {name: debug.OrderedRoute(route, order) for name, route in routes.items()}
    return CollectiveRoutes(debug.OrderedRoute(gpu, order), counted, order, list(buffered.values()))


def _hierarchical(schedule: Schedule, groups: dict[int, Group], process_group, recorder) -> BufferedGather | None:
    """The route of this rank's groups that are gathered in two legs; None where it has none.

    Process groups are made by all ranks together as soon as any rank has such a group.
    """
    wanted = {index for index, group in enumerate(schedule.groups) if group.algorithm == HIERARCHICAL}
    if not wanted:
        return None
    node_groups = make_node_groups(schedule.parallel, dist.get_backend(process_group))
    own = [group for index, group in groups.items() if index in wanted]
    assert node_groups is not None  # validation lets such groups pass only where nodes make two legs
    return HierarchicalGather(node_groups, device_of(own[0].whole), recorder) if own else None


def _symmetric(schedule: Schedule, groups: dict[int, Group], process_group, recorder) -> BufferedGather | None:
    """The route of this rank's groups that copy engines gather; None where it has none.

    Process groups are made as :func:`_hierarchical` makes them. Raises InputError where there is no such thing.
    """
    wanted = {index for index, group in enumerate(schedule.groups) if group.algorithm == SYMMETRIC}
    if not wanted:
        return None
    device, how = next((device_of(group.whole) for group in groups.values()), None), {}
    if device is not None:  # or this rank holds nothing, and gathers nothing
        why = symmetric_gather.missing(device.kind, dist.get_world_size(process_group), 1)
        if why is not None:
            raise InputError(f"cannot be done here: {why}", field=f"groups[{min(wanted)}].algorithm", value=SYMMETRIC)
        how = symmetric_gather.without_thread_blocks(device.device)
    data = make_data_group(schedule.parallel, dist.get_backend(process_group), **how)
    largest: dict = {}
    for whole in (group.whole for index, group in groups.items() if index in wanted):
        largest[whole.dtype] = max(largest.get(whole.dtype, 0), whole.numel())
    return symmetric_gather.SymmetricGather(data, device, largest, recorder) if largest else None


def _cpu_shard(
    schedule: Schedule, groups: dict[int, Group], process_group, faults: Faults, recorder: Recorder | None
) -> BufferedGather | None:
    """The route of this rank's groups that come by ``cpu_shard``; None where no rank has such a group.

    Process groups are made by all ranks together as soon as any rank has such a group.
    """
    if not any(
        action.route == "cpu_shard"
        for rank in schedule.ranks
        for entry in (rank.start, *rank.steps)
        for action in entry.unshard
    ):
        return None
    own = make_data_group(schedule.parallel, dist.get_backend(process_group))
    return ShardGather(own, device_of(next(iter(groups.values())).whole), faults, recorder) if groups else None


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
