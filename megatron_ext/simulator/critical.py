"""The pipeline without gathers: earliest ends, and what must still follow a step."""

from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.model import Workload
from megatron_ext.workload.order import steps_of_ranks


def _sweep(workload: Workload, timing: Timing, orders, source_of) -> list[list[float]]:
    """Longest path to the end of every step, each rank's steps taken in the order of ``orders``."""
    pp = workload.parallel.pp
    last = pp * workload.parallel.vp - 1
    times = [[(sum(t.forward), sum(t.backward)) for t in row] for row in timing.layers]
    ends: list[list[float]] = [[] for _ in range(pp)]
    done: dict[tuple, float] = {}
    waiting: dict[tuple, int] = {}
    ready = list(range(pp))
    while ready:
        rank = ready.pop()
        steps, mine = orders[rank], ends[rank]
        while len(mine) < len(steps):
            step = steps[len(mine)]
            stage, kind, microbatch = step
            source = source_of(stage, kind)
            begin = mine[-1] if mine else 0.0
            if 0 <= source <= last:
                other = (source, kind, microbatch)
                arrival = done.get(other)
                if arrival is None:
                    waiting[other] = rank
                    break
                begin = max(begin, arrival + (timing.p2p_us if source % pp != rank else 0.0))
            end = begin + times[rank][stage // pp][kind == "B"]
            mine.append(end)
            key = (stage, kind, microbatch)
            done[key] = end
            if key in waiting:
                ready.append(waiting.pop(key))
    return ends


def earliest_ends(workload: Workload, timing: Timing) -> list[list[float]]:
    """By rank and step index: the earliest end if no gather ever held a step up."""
    orders = steps_of_ranks(workload.parallel)
    return _sweep(workload, timing, orders, lambda stage, kind: stage - 1 if kind == "F" else stage + 1)


def tails(workload: Workload, timing: Timing) -> list[list[float]]:
    """By rank and step index: the least time from the begin of a step to the end of all steps."""
    orders = [steps[::-1] for steps in steps_of_ranks(workload.parallel)]
    swept = _sweep(workload, timing, orders, lambda stage, kind: stage + 1 if kind == "F" else stage - 1)
    return [mine[::-1] for mine in swept]
