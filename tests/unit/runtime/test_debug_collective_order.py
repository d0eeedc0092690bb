"""Collectives on a device: one thread issues those of all communicators, and the debug mode compares their order."""

import threading

import pytest
import torch
import torch.distributed as dist

from megatron_ext.runtime.debug import Checks, IssueOrder, OrderedRoute
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import RankGroup, ScheduleError
from megatron_ext.runtime.host_device import HostCompute
from megatron_ext.runtime.node_groups import NodeGroups
from megatron_ext.runtime.routes.hierarchical_gather import HierarchicalGather
from megatron_ext.runtime.routes.shard_gather import ShardGather


class AtOnce(HostDevice):
    """A device whose streams do at once what they are given."""

    kind = "cuda"

    def stream(self, name):
        return HostCompute()


@pytest.mark.parametrize(
    ("device", "own_threads"), [(AtOnce(), 0), (HostDevice(), 2)], ids=["device", "host processor"]
)
def test_on_a_device_no_thread_of_ours_issues_a_collective(monkeypatch, device, own_threads):
    issued = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(
        dist, "all_gather_into_tensor", lambda whole, shard, group: issued.append(threading.current_thread())
    )
    group = RankGroup(0, "chunk 0", torch.zeros(8), 0, 2)
    gathers = [HierarchicalGather(NodeGroups("local", "across", [[0], [1]], 0), device), ShardGather("own", device)]
    for gather in gathers:
        gather.issue(group).wait()
        gather.close()
    assert len(issued) == 3 and len({*issued} - {threading.main_thread()}) == own_threads


class Silent:
    def issue(self, group):
        return None


def test_data_parallel_ranks_that_issue_in_different_orders_are_told():
    groups = [RankGroup(index, "chunk 0", torch.zeros(8), 0, 1) for index in range(2)]
    orders = [IssueOrder(), IssueOrder()]
    checks = Checks({1: 0}, orders[0], lambda own: [(0, *order.so_far()) for order in orders])
    for order in orders:  # a second communicator is counted in the same order
        routes = [OrderedRoute(Silent(), order), OrderedRoute(Silent(), order)]
        routes[0].issue(groups[0])
        routes[1].issue(groups[1])
    checks.end_iteration(1, 0, 1)
    for order, turn in zip(orders, (groups, groups[::-1])):
        for group in turn:
            OrderedRoute(Silent(), order).issue(group)
    with pytest.raises(ScheduleError, match="ranks 0 and 1 issued their 4 and 4 gathers in different orders"):
        checks.end_iteration(2, 0, 1)
