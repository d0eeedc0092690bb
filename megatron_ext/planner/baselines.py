"""Rules that people use today, as schedules, for honest comparison by the same engine."""

import msgspec

from megatron_ext.errors import InputError
from megatron_ext.planner.fit import pinned_need
from megatron_ext.schedule.model import Metadata, PublishGroup, Schedule
from megatron_ext.simulator.stock import stock_schedule
from megatron_ext.workload.model import Workload


def all_gpu(workload: Workload) -> Schedule:
    """Stock Megatron: every group by ``gpu``, when stock Megatron would gather it."""
    return _named(stock_schedule(workload), "all-gpu")


def all_cpu(workload: Workload) -> Schedule:
    """As :func:`all_gpu`, but every group from the host copy.

    Raises:
        InputError: the host copies do not fit the pinned memory of a node.
    """
    schedule = stock_schedule(workload)
    check_pinned(workload, schedule.groups, ["cpu"] * len(schedule.groups))
    return _named(rerouted(schedule, ["cpu"] * len(schedule.groups)), "all-cpu")


def check_pinned(workload: Workload, groups, routed) -> None:
    """Raises InputError naming the node whose host copies exceed ``limits.pinned_host_bytes``."""
    limit = workload.limits.pinned_host_bytes
    for node, need in enumerate(pinned_need(workload, groups, routed)):
        if limit is not None and need > limit:
            raise InputError(
                f"cannot fit: host copies on node {node} need {need} bytes, {need - limit} bytes short",
                field="limits.pinned_host_bytes", value=limit,
            )  # fmt: skip


def rerouted(schedule: Schedule, routed: list[str]) -> Schedule:
    """``schedule`` with group ``i`` going by ``routed[i]`` (``gpu`` or ``cpu``), published where needed."""

    def change(actions):
        return tuple(msgspec.structs.replace(a, route=routed[a.group]) for a in actions)

    ranks, order = [], {}
    for rank in schedule.ranks:
        start = msgspec.structs.replace(rank.start, unshard=change(rank.start.unshard))
        steps = tuple(msgspec.structs.replace(e, unshard=change(e.unshard)) if e.unshard else e for e in rank.steps)
        ranks.append(msgspec.structs.replace(rank, start=start, steps=steps))
        for actions in (start.unshard, *(entry.unshard for entry in steps)):
            order.update((a.group, None) for a in actions if a.route == "cpu")
    publish = tuple(PublishGroup(group=group, to=("cpu",)) for group in order)
    return msgspec.structs.replace(schedule, ranks=tuple(ranks), publish=publish)


def _named(schedule: Schedule, name: str) -> Schedule:
    return msgspec.structs.replace(schedule, metadata=Metadata(planner=name))


BASELINES = {
    "all-gpu": ({"gpu"}, lambda workload, timing: all_gpu(workload)),
    "all-cpu": ({"cpu"}, lambda workload, timing: all_cpu(workload)),
}
"""By name: the routes it needs, and the rule (workload, timing) -> schedule."""
