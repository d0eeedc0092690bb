"""Actions that stand at layers against the layers that use their groups.

The schedule alone does not know which layers of a chunk a group's parameters belong to; the
workload does. Within a step, a group must be unsharded no later than before its first layer in
the direction of the step, and freed no earlier than behind its last.
"""

from megatron_ext.schedule.group_uses import uses_of_groups
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.schedule.validate import InvalidSchedule
from megatron_ext.workload.workload import Workload


def check_layers(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse actions at layers that do not exist, come too late or free too early.

    Args:
        schedule: valid, with the workload's groups.
        workload: what it is for.

    Raises:
        InvalidSchedule: naming the action.
    """
    uses = uses_of_groups(schedule.groups, workload)
    pp = schedule.parallel.pp
    for rank in schedule.ranks:
        for index, entry in enumerate(rank.steps):
            if all(action.at < 0 for action in (*entry.unshard, *entry.reshard)):
                continue
            backward = "B" in entry.step
            chunk = int(entry.step.partition("B" if backward else "F")[0]) // pp
            num_layers = workload.chunk(rank.pp_rank, chunk).num_layers

            def fail(message: str, field: str, at: int, entry=entry, rank=rank, index=index):
                said = f"step {entry.step}: {message}"
                raise InvalidSchedule.at_step(rank.pp_rank, index, said, f"{field}.at", at, file)

            for kind in ("unshard", "reshard"):
                for n, action in enumerate(getattr(entry, kind)):
                    if action.at < 0:
                        continue
                    field = f"{kind}[{n}]"
                    if action.at >= num_layers:
                        fail(f"the chunk has {num_layers} layers", field, action.at)
                    if schedule.groups[action.group].model_chunk_id != chunk:
                        continue
                    first, last = uses[action.group]
                    if kind == "unshard" and (action.need_by < 0 or action.need_by == index):
                        if action.at < last if backward else action.at > first:
                            fail(
                                f"layer {last if backward else first} computes on group {action.group} before that",
                                field,
                                action.at,
                            )
                    elif kind == "reshard" and (action.at > first if backward else action.at < last):
                        layer = first if backward else last
                        fail(f"layer {layer} still computes on group {action.group} after that", field, action.at)
