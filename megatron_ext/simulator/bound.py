"""A proven lower bound on the step time of every schedule of a workload."""

from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.model import Workload
from megatron_ext.workload.order import steps_of_ranks


def critical_path(workload: Workload, timing: Timing) -> list[list[float]]:
    """Earliest end of every step of every rank if no gather ever held one up."""
    parallel = workload.parallel
    pp, last = parallel.pp, parallel.pp * parallel.vp - 1
    ranks = steps_of_ranks(parallel)
    times = [[(sum(t.forward), sum(t.backward)) for t in row] for row in timing.layers]
    ends: list[list[float]] = [[] for _ in range(pp)]
    done: dict[tuple[int, str, int], float] = {}
    waiting: dict[tuple[int, str, int], int] = {}
    ready = list(range(pp))
    while ready:
        rank = ready.pop()
        steps = ranks[rank]
        mine = ends[rank]
        while len(mine) < len(steps):
            stage, kind, microbatch = step = steps[len(mine)]
            source = (stage - 1 if kind == "F" else stage + 1, kind, microbatch)
            begin = mine[-1] if mine else 0.0
            if 0 <= source[0] <= last:
                arrival = done.get(source)
                if arrival is None:
                    waiting[source] = rank
                    break
                begin = max(begin, arrival + (timing.p2p_us if source[0] % pp != rank else 0.0))
            end = begin + times[rank][stage // pp][kind == "B"]
            mine.append(end)
            done[step] = end
            if step in waiting:
                ready.append(waiting.pop(step))
    return ends


def lower_bound(workload: Workload, timing: Timing) -> float:
    """The compute and bubble bound: every relaxation only removes waiting."""
    return max(ends[-1] for ends in critical_path(workload, timing))
