"""Bytes of parameters that a schedule sends over the network between nodes in one iteration."""

from collections import Counter

from megatron_ext.schedule.user_defined_schedule import Schedule


def planned_network_bytes(schedule: Schedule) -> float:
    """Sum over all nodes of the parameter bytes they send, without headers.

    gloo gathers in a ring over the group's ranks: each edge of the ring carries all bytes but one
    rank's shard, and as many edges cross as there are nodes (ranks of a node are neighbours).
    Publishing sends every byte once to each further node, and so does a hierarchical gather.
    """
    parallel = schedule.parallel
    gathers: Counter[int] = Counter()
    for rank in schedule.ranks:
        for actions in (rank.start.unshard, *(entry.unshard for entry in rank.steps)):
            gathers.update(action.group for action in actions if action.route == "gpu")
    published = {entry.group for entry in schedule.publish}
    total = 0.0
    for index, group in enumerate(schedule.groups):
        nodes = len({parallel.node_of(group.pp_rank, dp) for dp in range(parallel.dp)})
        if nodes > 1:
            once = (nodes - 1) * group.bytes
            total += gathers[index] * (
                once if group.algorithm else nodes * group.bytes * (parallel.dp - 1) / parallel.dp
            )
            total += (index in published) * once
    return total
