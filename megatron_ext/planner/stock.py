"""Stock Megatron's own rules, written as schedules: its buckets, all by ``gpu``.

:func:`stock_schedule` is the rule with ``--overlap-param-gather``, :func:`synchronous_schedule` the rule without it.

Sources, in Megatron-LM: ``megatron/core/distributed`` for the buckets (:mod:`megatron_ext.workload.bucket_rules`);
``megatron/core/pipeline_parallel/schedules.py`` ``forward_step_helper_preprocess`` for the interleaved order: chunks 0
and 1 before warm-up, chunk c + 1 at the forward whose virtual micro-batch plus pipeline rank is the first micro-batch
of chunk c, all buckets of a chunk at once. Other orders gather the first bucket of a chunk when it first computes, and
each further one when the one before it is used (``param_and_grad_buffer.py`` ``finish_param_sync``). Without the
option ``distrib_optimizer.py`` ``step_with_ready_grads`` gathers all buckets of all chunks and waits for them. Every
release from core_v0.9.0 to core_v0.19.0 does so.
"""

from megatron_ext.planner.assemble import schedule_of
from megatron_ext.schedule.group_facts import make_group
from megatron_ext.schedule.user_defined_schedule import Group, Rank, Reshard, Schedule, Start, StepActions, Unshard
from megatron_ext.workload.bucket_rules import buckets, layer_buckets, stock_buckets
from megatron_ext.workload.route import ALL_GATHER
from megatron_ext.workload.step_order import schedule_table, steps_of_ranks
from megatron_ext.workload.workload import Workload

STOCK = "stock Megatron"
OVERLAPPED, SYNCHRONOUS = f"{STOCK} with --overlap-param-gather", f"{STOCK} without --overlap-param-gather"


def groups_of(workload: Workload, cut=buckets) -> tuple[tuple[Group, ...], list[list[int]]]:
    """Groups that the rule ``cut`` makes, and the ids of each stage's groups."""
    groups, of_stage = [], []
    for chunk in workload.chunks:
        ids = []
        for members in cut(chunk):
            ids.append(len(groups))
            groups.append(make_group(workload, chunk.pp_rank, chunk.model_chunk_id, members))
        of_stage.append(ids)
    return tuple(groups), of_stage


def issue_index(workload: Workload, pp_rank: int, chunk: int) -> int:
    """Index among the rank's forwards at which stock Megatron starts the gather of ``chunk``; -1 means before
    warm-up."""
    parallel = workload.parallel
    assert parallel.order == "interleaved", "only the interleaved order looks ahead"
    if chunk < 2:
        return -1
    table = schedule_table(parallel.num_microbatches, parallel.vp, parallel.microbatch_group_size)
    first = next(index for index, (microbatch, c) in enumerate(table) if c == chunk - 1 and microbatch == 0)
    return max(first - pp_rank, 0)


def stock_schedule(workload: Workload, cut=None) -> Schedule:
    """Stock Megatron's rule at zero stages 1 and 2. At zero stage 3 it is the rule of FSDP: each layer is gathered when
    the previous one computes, and freed after its own compute.

    ``cut`` makes the groups of a chunk (default: :func:`stock_buckets`, or :func:`layer_buckets`).
    """
    if workload.zero_stage == 3:
        return _stock_zero3(workload, cut or layer_buckets)
    parallel = workload.parallel
    cut = cut or (lambda chunk: stock_buckets(chunk, parallel.data_parallel_size))
    parts = [part for chunk in workload.chunks for part in cut(chunk)]
    first_layers, of_experts = [min(p.layer for p in part) for part in parts], [part[0].expert for part in parts]
    groups, of_stage = groups_of(workload, cut)
    ranks = []
    for pp_rank, steps in enumerate(steps_of_ranks(parallel)):
        first_use, forwards = {}, []
        for index, step in enumerate(steps):
            if step.kind == "F":
                forwards.append(index)
                first_use.setdefault(step.stage // parallel.pp, index)
        start, at_step = [], {}
        for chunk in range(parallel.vp):
            need_by = first_use[chunk]
            mine = of_stage[chunk * parallel.pp + pp_rank]
            if parallel.order == "interleaved":
                number = issue_index(workload, pp_rank, chunk)
                issue = -1 if number < 0 else forwards[number]
                unshards = [Unshard(group, ALL_GATHER, need_by) for group in reversed(mine)]
            else:
                issue, unshards = need_by, []
                for group in mine:
                    # Megatron gathers the next bucket of a layer while the previous one is used, inside the layer. A
                    # schedule has no place there. The nearest place that is not slower is the layer before. Buckets of
                    # experts form a sequence of their own: the first of them is gathered when its layer needs it.
                    alike = [other for other in mine if of_experts[other] == of_experts[group]]
                    earlier = [first_layers[other] for other in alike if first_layers[other] < first_layers[group]]
                    first = first_layers[group] if of_experts[group] else 0
                    unshards.append(Unshard(group, ALL_GATHER, need_by, max(earlier, default=first) or -1))
                unshards.sort(key=lambda action: action.at)
            (start if issue < 0 else at_step.setdefault(issue, [])).extend(unshards)
        entries = tuple(StepActions(str(step), unshard=tuple(at_step.get(i, ()))) for i, step in enumerate(steps))
        ranks.append(Rank(pp_rank=pp_rank, start=Start(unshard=tuple(start)), steps=entries))
    return schedule_of(workload, groups, ranks, planner="stock")


def synchronous_schedule(workload: Workload) -> Schedule:
    """Stock Megatron without ``--overlap-param-gather`` (zero stages 1 and 2): each rank waits for all of its buckets
    before its first step.

    For :func:`megatron_ext.simulator.simulation.simulate` only. Megatron trains by this rule without a schedule, and a
    schedule file must not have ``need_by`` -1 at the start.
    """
    assert workload.zero_stage < 3, "stock Megatron has no zero stage 3"
    parallel = workload.parallel
    groups, of_stage = groups_of(workload, lambda chunk: stock_buckets(chunk, parallel.data_parallel_size))
    ranks = []
    for pp_rank, steps in enumerate(steps_of_ranks(parallel)):
        stages = range(pp_rank, parallel.pp * parallel.vp, parallel.pp)
        unshards = tuple(Unshard(group, ALL_GATHER) for stage in stages for group in reversed(of_stage[stage]))
        entries = tuple(StepActions(str(step)) for step in steps)
        ranks.append(Rank(pp_rank=pp_rank, start=Start(unshard=unshards), steps=entries))
    return schedule_of(workload, groups, ranks, planner="stock")


STOCK_RULES = {OVERLAPPED: stock_schedule, SYNCHRONOUS: synchronous_schedule}
"""By the option that Megatron trains with: the function that makes the schedule."""


def _stock_zero3(workload: Workload, cut) -> Schedule:
    groups, of_stage = groups_of(workload, cut)
    parallel = workload.parallel
    patterns = {}
    for chunk, ids in zip(workload.chunks, of_stage):
        spans = {g: (part[0].layer, max(part[0].uses)) for g, part in zip(ids, cut(chunk))}
        sizes = {g: groups[g].bytes for g in ids}
        for kind in "FB":
            stage = chunk.model_chunk_id * parallel.pp + chunk.pp_rank
            patterns[stage, kind] = stream(spans, sizes, chunk.num_layers, kind, workload.limits.whole_parameter_bytes)
    ranks = []
    for pp_rank, steps in enumerate(steps_of_ranks(parallel)):
        entries = tuple(StepActions(str(step), (), *patterns[step.stage, step.kind]) for step in steps)
        ranks.append(Rank(pp_rank=pp_rank, steps=entries))
    return schedule_of(workload, groups, ranks, planner="stock")


def stream(
    spans, sizes, num_layers: int, kind: str, limit: int | None
) -> tuple[tuple[Unshard, ...], tuple[Reshard, ...]]:
    """Unshards and reshards of one step, layer by layer. The next layer's groups are gathered while a layer computes,
    if they fit.

    Args:
        spans: by group, the first and the last layer that uses it. ``sizes``: bytes by group.
        kind: ``F`` or ``B``. In a backward the layers run in descending order.
        limit: bytes that may be whole at the same time; None means unlimited.
    """
    position = (lambda layer: num_layers - 1 - layer) if kind == "B" else (lambda layer: layer)
    first_at = {g: min(map(position, span)) for g, span in spans.items()}
    last_at = {g: max(map(position, span)) for g, span in spans.items()}
    unshards = []
    for group in sorted(spans, key=lambda g: (first_at[g], g)):
        place = first_at[group]
        before = max((first_at[g] for g in spans if first_at[g] < place), default=None)
        if before is not None:
            # Bytes that are whole while the previous layer computes: the groups that it uses, and all groups that this
            # layer is the first to use.
            whole = sum(sizes[g] for g in spans if first_at[g] <= before <= last_at[g] or first_at[g] == place)
            place = before if limit is None or whole <= limit else place
        unshards.append((place, Unshard(group, ALL_GATHER, -1, position(place) if place else -1)))
    unshards.sort(key=lambda item: item[0])
    return tuple(action for _, action in unshards), tuple(
        Reshard(g, position(last_at[g])) for g in sorted(spans, key=lambda g: (last_at[g], g))
    )
