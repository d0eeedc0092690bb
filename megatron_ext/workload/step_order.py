"""The order of steps on every pipeline rank. It is Megatron's order and is never changed.

Sources: Megatron-LM ``megatron/core/pipeline_parallel/schedules.py`` --
``get_schedule_table`` and ``get_pp_rank_microbatches`` for the interleaved order,
``forward_backward_pipelining_without_interleaving`` for 1F1B.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.step import Step


def schedule_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """``(microbatch, model_chunk_id)`` of every virtual micro-batch, in forward order.

    The last micro-batch group may be smaller than the others.
    """
    table = []
    for first in range(0, num_microbatches, group_size):
        last = min(first + group_size, num_microbatches)
        table += [(microbatch, chunk) for chunk in range(num_chunks) for microbatch in range(first, last)]
    return table


def num_warmup(parallel: Parallel, pp_rank: int) -> int:
    """Forwards that ``pp_rank`` runs before its steady state, whose first forward precedes the first backward."""
    total = parallel.num_microbatches * parallel.vp
    if parallel.order == "gpipe":
        return total
    if parallel.order == "no_pipeline":
        return 0
    behind = parallel.pp - pp_rank - 1
    if parallel.order == "1f1b":
        return min(behind, total)
    return min(behind * 2 + (parallel.vp - 1) * parallel.microbatch_group_size, total)


@lru_cache(maxsize=4)
def steps_of_ranks(parallel: Parallel) -> tuple[tuple[Step, ...], ...]:
    """Steps of one training iteration for every pipeline rank, in the order Megatron runs them."""
    pp, vp = parallel.pp, parallel.vp
    table = schedule_table(parallel.num_microbatches, vp, parallel.microbatch_group_size)
    if parallel.order == "gpipe":  # every chunk runs all its micro-batches before the next chunk
        table = schedule_table(parallel.num_microbatches, vp, parallel.num_microbatches)
    ranks = []
    for rank in range(pp):
        forward = [Step(chunk * pp + rank, "F", microbatch) for microbatch, chunk in table]
        # Backwards mirror the forwards: the same table with the chunks in reverse.
        backward = [Step((vp - 1 - chunk) * pp + rank, "B", microbatch) for microbatch, chunk in table]
        warmup = num_warmup(parallel, rank)
        steady = len(table) - warmup
        steps = forward[:warmup]
        for position in range(steady):
            steps += (forward[warmup + position], backward[position])
        steps += backward[steady:]
        ranks.append(tuple(steps))
    return tuple(ranks)


def run_in_order(
    parallel: Parallel,
    orders: Sequence[Sequence[Step]],
    hop_us: float,
    run: Callable[[int, int, Step, float], float],
    *,
    backward: bool = False,
) -> None:
    """Visit the steps of all pipeline ranks. A step is visited when the end of the step that it depends on is known.

    Args:
        orders: the steps of each rank.
        hop_us: time from the end of a step until its output arrives on another rank.
        run: called with (rank, index of the step, step, arrival time of its input); returns the step's end.
        backward: visit from the last steps to the first. A step then depends on the step that uses its output.
    """
    last = parallel.pp * parallel.vp - 1
    position = [0] * parallel.pp
    done: dict[tuple, float] = {}
    waiting: dict[tuple, int] = {}
    ready = list(range(parallel.pp))
    while ready:  # ends: a rank comes back once for each step that it waited for
        rank = ready.pop()
        steps = orders[rank]
        while position[rank] < len(steps):  # ends: each turn raises the position or breaks
            step = steps[position[rank]]
            stage, kind, microbatch = step
            source = (stage - 1 if (kind == "F") != backward else stage + 1, kind, microbatch)
            arrival = 0.0
            if 0 <= source[0] <= last:
                end = done.get(source)
                if end is None:
                    waiting[source] = rank
                    break
                arrival = end + (hop_us if source[0] % parallel.pp != rank else 0.0)
            done[step] = run(rank, position[rank], step, arrival)
            position[rank] += 1
            if step in waiting:
                ready.append(waiting.pop(step))
