"""A schedule without its look-ahead, for comparison."""

from msgspec.structs import replace

from megatron_ext.schedule import match, validate
from megatron_ext.schedule.group_uses import uses_of_groups
from megatron_ext.schedule.user_defined_schedule import Schedule, Unshard


def without_look_ahead(schedule: Schedule, workload) -> Schedule:
    """The same groups by the same routes, freed at the same places, each issued just before the
    first layer that needs it."""
    uses, ranks = uses_of_groups(schedule.groups, workload), []
    for rank in schedule.ranks:
        late: dict[int, list[Unshard]] = {}
        for index, entry in [(-1, rank.start), *enumerate(rank.steps)]:
            for action in entry.unshard:
                step = index if action.need_by < 0 else action.need_by
                first, last = uses[action.group]
                late.setdefault(step, []).append(
                    Unshard(action.group, action.route, -1, first if "F" in rank.steps[step].step else last)
                )
        for index, actions in late.items():
            actions.sort(key=lambda action: action.at if "F" in rank.steps[index].step else -action.at)
        steps = tuple(replace(entry, unshard=tuple(late.get(index, ()))) for index, entry in enumerate(rank.steps))
        ranks.append(replace(rank, start=replace(rank.start, unshard=()), steps=steps))
    late_schedule = validate.validate(replace(schedule, ranks=tuple(ranks), predicted=None))
    match.match(late_schedule, workload)
    return late_schedule
