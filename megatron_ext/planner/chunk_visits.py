"""When each chunk of a rank computes: the known future that planning rests on."""

from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload


def visits_of_rank(workload: Workload, pp_rank: int) -> list[list[int]]:
    """By model chunk, the indices of the rank's steps that compute it, ascending."""
    pp = workload.parallel.pp
    visits: list[list[int]] = [[] for _ in range(workload.parallel.vp)]
    for index, step in enumerate(steps_of_ranks(workload.parallel)[pp_rank]):
        visits[step.stage // pp].append(index)
    return visits
