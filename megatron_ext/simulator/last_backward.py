"""What no schedule can avoid around the last backward of a chunk: reducing gradients, and sharing processors.

[Note: Why these are bounds]
* Gradients of a layer can be reduced only after its last backward; so from there on are reduced
  all of this layer, of those below it and of chunks whose last backward comes later, see
  :mod:`megatron_ext.simulator.processor_work`. While the rank computes, reducing is slowed by what the table
  says, and takes processors from that compute: :func:`_from_start` says what is left after compute at least.
* Data-parallel ranks of one pipeline rank behave alike: all are at their last backward together,
  and before it their compute, and the cheapest transport of all that must have come, take
  processors; what comes by ``cpu`` for the first time has been published before.
"""

from itertools import accumulate
from typing import NamedTuple

from megatron_ext.simulator.least_loads import least_loads
from megatron_ext.simulator.processor_work import Come, Gathering, Reducing, least_reducing, replicas
from megatron_ext.simulator.timing import COMPUTE, REDUCE, Timing
from megatron_ext.workload.model import Workload
from megatron_ext.workload.order import steps_of_ranks


class LastBackward(NamedTuple):
    """The last backward of a chunk, at index ``step`` of its rank's steps. ``compute_us``: compute of
    the rank from there on, ``before_us``: before it. ``from_start_us``: no less from its beginning until
    all gradients that were not complete are reduced. ``come``: what must have come before it."""

    step: int
    compute_us: float
    before_us: float
    from_start_us: float
    come: list[Come]


def last_backwards(workload: Workload, timing: Timing) -> list[list[LastBackward]]:
    """By pipeline rank, the last backward of each of its chunks, the last first."""
    pp = workload.parallel.pp
    found = []
    for rank, steps in enumerate(steps_of_ranks(workload.parallel)):
        count, tail_us = replicas(workload, timing, rank), least_tail_us(workload, timing, rank)
        needs = least_loads(workload, timing, rank)
        durations = [timing.layers[rank][step.stage // pp] for step in steps]
        done = [0.0, *accumulate(sum(times.forward if step.kind == "F" else times.backward) for step, times in zip(steps, durations))]
        mine, seen, compute, reducing, waiting = [], set(), 0.0, Reducing(), [(0.0, Reducing())]
        whole = sum(sum(t.forward) + sum(t.backward) for t in timing.layers[rank]) * workload.parallel.num_microbatches
        for index in range(len(steps) - 1, -1, -1):
            chunk, backward = steps[index].stage // pp, steps[index].kind == "B"
            times = timing.layers[rank][chunk]
            if not backward or chunk in seen:
                compute += sum(times.backward if backward else times.forward)
                continue
            seen.add(chunk)
            from_start, above = 0.0, sum(times.backward)
            for layer, least in enumerate(least_reducing(workload, workload.chunk(rank, chunk), timing)):
                reducing += least
                if least.us:  # not before this layer's own backward
                    waiting.append((compute, reducing))
                    from_start = max(from_start, _compute_us(above, timing, count) + _from_start(compute, waiting, timing, count, tail_us))
                above -= times.backward[layer]
                compute += times.backward[layer]
            from_start = max(from_start, _from_start(compute, waiting, timing, count, tail_us))
            come = [Come(need.loaded, need.fresh, _compute_us(done[index] - done[need.step + 1] + need.rest_us, timing, count)) for need in needs if need.step < index]
            mine.append(LastBackward(index, compute, whole - compute, from_start, come))
        found.append(mine)
    return found


def least_tail_us(workload: Workload, timing: Timing, rank: int) -> float:
    """No less passes between a rank's last compute and the end of reducing its gradients: one group
    holds what its very last layer computes with, if that has parameters."""
    pp = workload.parallel.pp
    chunk = workload.chunk(rank, steps_of_ranks(workload.parallel)[rank][-1].stage // pp)
    return timing.least_reduce_us if any(parameter.layer == 0 for parameter in chunk.parameters) else 0.0


def processor_bound(workload: Workload, timing: Timing, last: list[list[LastBackward]]) -> float:
    """The bound by processors that ranks of a machine share; 0 where they do not."""
    if timing.processors is None:
        return 0.0
    work: dict[int, float] = {}
    bound = 0.0
    for rank, mine in enumerate(last):
        machine, count = timing.machine_of(rank, 0), replicas(workload, timing, rank)
        work[machine] = work.get(machine, 0.0) + count * (mine[0].before_us + mine[0].compute_us)
        gathering = Gathering(workload, timing, rank)
        for one in mine:
            bound = max(bound, (count * one.before_us + gathering.had_us(one.come)) / timing.processors + one.from_start_us)
    return max(bound, max(work.values()) / timing.processors + min(least_tail_us(workload, timing, rank) for rank in range(len(last))))


def rest_us(done_us: float, step: int, mine: list[LastBackward], timing: Timing, count: int) -> float:
    """No less follows on a rank that has computed ``done_us``, in step ``step``, with no gradient reduced yet."""
    return max((_compute_us(one.before_us - done_us, timing, count) + one.from_start_us for one in mine if one.step > step), default=0.0)


def _compute_us(alone_us: float, timing: Timing, count: int) -> float:
    """Least time in which ``count`` ranks of a machine each compute this."""
    return alone_us if timing.processors is None else alone_us * max(1.0, count / timing.processors)


def _from_start(compute_us: float, waiting: list[tuple[float, Reducing]], timing: Timing, count: int, tail_us: float) -> float:
    """Least time in which ``count`` ranks of a machine each compute ``compute_us`` and reduce.

    ``waiting``: with so much of that compute still to come, the first of so much may be reduced; all
    of it, the last. Of ``total`` microseconds of reducing, each done beside compute makes that
    ``takes`` longer; what is not done beside it comes after. Of the ``part`` that waits for all
    but ``left`` of compute, with ``s`` by which it is stretched, at most ``(left + s) / slower``
    can be done beside it, and ``s`` is at least ``takes`` times that: so at most
    ``left / (slower - takes)``. Stretching compute further, or idling, costs no less than the
    reducing that it hides.
    """
    processors, slower = timing.processors, 1.0 + timing.least_excess(REDUCE, COMPUTE)
    alone, total = _compute_us(compute_us, timing, count), waiting[-1][1]
    takes = 0.0
    if processors is not None and count >= processors and total.us:
        takes = min(count * total.share / processors, 0.5)  # the engine leaves compute the other half
    after = (1.0 - takes) * max(part.us - _compute_us(left, timing, count) / (slower - takes) for left, part in waiting)
    return alone + max(takes * total.us + after, tail_us)
