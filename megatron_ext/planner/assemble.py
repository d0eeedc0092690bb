"""Turns decisions into a schedule. Every planner and every baseline uses this module."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ext.schedule.user_defined_schedule import (
    SCHEDULE_VERSION,
    Group,
    Model,
    PlanOptions,
    PublishGroup,
    Rank,
    Reshard,
    Schedule,
    ScheduleMetadata,
    StageIn,
    Start,
    StepActions,
    Unshard,
)
from megatron_ext.workload.route import Copy, Route, kind_of
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload, fingerprint


class Placed(NamedTuple):
    """One unshard of ``group`` by ``route``. It is issued at step index ``issue`` (-1: the start), and step index
    ``need_by`` waits for it. A staged route also has a ``slot`` and the step index ``stage`` of its stage-in."""

    group: int
    route: Route
    issue: int
    need_by: int
    at: int = -1
    slot: int = -1
    stage: int = -1


class Freed(NamedTuple):
    """One reshard of ``group`` at step index ``step``, after layer ``at`` (-1: at the end of the step)."""

    group: int
    step: int
    at: int = -1


def assemble(
    workload: Workload,
    groups,
    placed: list[list[Placed]],
    freed: list[list[Freed]] | None = None,
    *,
    planner: str,
    options: PlanOptions | None = None,
) -> Schedule:
    """Make the schedule of these decisions.

    Args:
        groups: all groups; the id of a group is its index.
        placed: by pipeline rank, unshards in issue order.
        freed: by pipeline rank, reshards.
    """
    ranks = []
    for pp_rank, steps in enumerate(steps_of_ranks(workload.parallel)):
        unshards: dict[int, list[Unshard]] = {}
        stages: dict[int, list[StageIn]] = {}
        reshards: dict[int, list[Reshard]] = {}
        for item in placed[pp_rank]:
            need_by = -1 if item.need_by == item.issue else item.need_by
            unshards.setdefault(item.issue, []).append(Unshard(item.group, item.route, need_by, item.at))
            if kind_of(item.route).staged:
                stages.setdefault(item.stage, []).append(StageIn(item.group, item.slot))
        for item in freed[pp_rank] if freed else ():
            reshards.setdefault(item.step, []).append(Reshard(item.group, item.at))
        entries = tuple(
            StepActions(
                str(step), tuple(stages.get(index, ())), tuple(unshards.get(index, ())), tuple(reshards.get(index, ()))
            )
            for index, step in enumerate(steps)
        )
        start = Start(tuple(stages.get(-1, ())), tuple(unshards.get(-1, ())))
        ranks.append(Rank(pp_rank=pp_rank, start=start, steps=entries))
    return schedule_of(workload, groups, ranks, planner, options)


def published(ranks: Sequence[Rank]) -> tuple[PublishGroup, ...]:
    """Groups to publish, in the order of their first unshard, each with the copies that its unshards read."""
    to: dict[int, dict[Copy, None]] = {}
    for action in (action for rank in ranks for action in rank.unshards):
        if (copy := kind_of(action.route).copy) is not None:
            to.setdefault(action.group, {})[copy] = None
    return tuple(PublishGroup(group=group, to=tuple(copies)) for group, copies in to.items())


def schedule_of(
    workload: Workload, groups: Sequence[Group], ranks: Sequence[Rank], planner: str, options: PlanOptions | None = None
) -> Schedule:
    """The schedule with these groups and these steps of each rank."""
    return Schedule(
        schema_version=SCHEDULE_VERSION,
        kind="user_defined_schedule",
        metadata=ScheduleMetadata(planner=planner, options=options or PlanOptions()),
        parallel=workload.parallel,
        zero_stage=workload.zero_stage,
        model=Model(fingerprint=fingerprint(workload)),
        limits=workload.limits,
        groups=tuple(groups),
        ranks=tuple(ranks),
        publish=published(ranks),
    )
