"""Rules that people use today, written as schedules, so that the same engine simulates them for comparison.

========================= ==================================================================
all-gpu                   stock Megatron: one bucket per chunk, its chunk look-ahead (zero stage 3: each
                          layer is gathered while the previous one computes, as in FSDP)
all-cpu                   the same, every group from the host copy
window-1, window-2        all-gather, chunks of the next k steps (torch pipelining's window)
share-25, -50, -75        a fixed share of every bucket from the host (Twin-Flow, DeepSpeed
                          ``ratio``), timed as stock Megatron
urgency                   all-gather by layer in the order of first use (TicTac, arXiv 1803.03288)
pipeswitch                all-gather in groups sized by dynamic programming (PipeSwitch, OSDI 2020)
hierarchical              as all-gpu, but every all-gather runs between nodes first, then inside them
                          (BlueConnect, MLSys 2019)
gathers-only              our own search with all-gathers alone
========================= ==================================================================

"""

from collections.abc import Container
from math import inf

from msgspec.structs import replace

from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import Freed, Placed, assemble
from megatron_ext.planner.blocks import cut_by_layer, make_blocks
from megatron_ext.planner.effort import judged_us, last_found
from megatron_ext.planner.gather_search import search
from megatron_ext.planner.link_split import split_off
from megatron_ext.planner.passes.place_gathers import Choices, place_gathers
from megatron_ext.planner.pipelined_groups import pipelined_cut
from megatron_ext.planner.problem import Problem
from megatron_ext.planner.reroute import rerouted
from megatron_ext.planner.stock import groups_of, stock_schedule
from megatron_ext.schedule.footprint import over_limit, pinned_need
from megatron_ext.schedule.user_defined_schedule import Schedule, ScheduleMetadata
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import buckets, layer_buckets
from megatron_ext.workload.nodes import has_hierarchy
from megatron_ext.workload.route import ALL_GATHER, HIERARCHICAL, HOST_COPY
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload


def all_gpu(workload: Workload) -> Schedule:
    """Stock Megatron's rule: every group by ``gpu``, at the step at which stock Megatron gathers it."""
    return _named(stock_schedule(workload), "all-gpu")


def all_cpu(workload: Workload) -> Schedule:
    """As :func:`all_gpu`, but every group from the host copy.

    Raises:
        InputError: the host copies do not fit the pinned memory of a node.
    """
    schedule = stock_schedule(workload)
    check_pinned(workload, schedule.groups, range(len(schedule.groups)))
    return _named(rerouted(schedule, lambda _: HOST_COPY), "all-cpu")


def fixed_share(workload: Workload, percent: int) -> Schedule:
    """About ``percent`` of the bytes of every bucket from the host, the rest by all-gather.

    Raises:
        InputError: the host copies do not fit the pinned memory of a node.
    """
    rule = layer_buckets if workload.zero_stage == 3 else buckets

    def cut(chunk):
        parts = []
        for bucket in rule(chunk):
            part, rest = split_off(bucket, sum(p.bytes for p in bucket) * percent // 100)
            parts += [(members, host) for members, host in ((rest, False), (part, True)) if members]
        return parts

    parts = [host for chunk in workload.chunks for _, host in cut(chunk)]
    hosted = {index for index, host in enumerate(parts) if host}
    schedule = stock_schedule(workload, lambda chunk: [members for members, _ in cut(chunk)])
    check_pinned(workload, schedule.groups, hosted)
    made = rerouted(schedule, lambda action: HOST_COPY if action.group in hosted else ALL_GATHER)
    return _named(made, f"share-{percent}")


def window(workload: Workload, ahead: int) -> Schedule:
    """The chunks of the current step and of the next ``ahead`` steps are whole, by all-gather.

    Raises:
        InputError: these chunks do not fit the device.
    """
    groups, of_stage = groups_of(workload)
    limit = workload.streamed_bytes
    placed, freed = [], []
    for rank, steps in enumerate(steps_of_ranks(workload.parallel)):
        stages = [step.stage for step in steps]
        whole: set[int] = set()
        mine, gone = [], []
        for index in range(len(stages)):
            near = stages[index : index + ahead + 1]
            if workload.zero_stage == 3:
                gone += [Freed(g, index - 1) for stage in sorted(whole - set(near)) for g in of_stage[stage]]
                whole &= set(near)
            for distance, stage in enumerate(near):
                if stage not in whole:
                    mine += [Placed(g, ALL_GATHER, index, index + distance) for g in of_stage[stage]]
                    whole.add(stage)
            need = sum(groups[g].bytes for stage in whole for g in of_stage[stage])
            if limit is not None and need > limit:
                raise InputError(
                    f"a window of {ahead} needs {need} bytes on pipeline rank {rank}",
                    field="limits.whole_parameter_bytes",
                    value=limit,
                )
        placed.append(mine)
        freed.append(gone)
    return assemble(workload, groups, placed, freed, planner=f"window-{ahead}")


def urgency(workload: Workload, timing: Timing) -> Schedule:
    """Every layer by all-gather, as early as the memory limit allows, in the order of first use."""
    return _placed(workload, timing, [cut_by_layer(chunk) for chunk in workload.chunks], "urgency")


def pipeswitch(workload: Workload, timing: Timing) -> Schedule:
    """As :func:`urgency`, but in groups of layers whose sizes trade the number of calls against waiting time."""
    limit = workload.streamed_bytes
    cuts = [pipelined_cut(timing, chunk, ALL_GATHER, limit) for chunk in workload.chunks]
    return _placed(workload, timing, cuts, "pipeswitch")


def _placed(workload: Workload, timing: Timing, cuts, name: str) -> Schedule:
    blocks = make_blocks(workload, cuts)
    limit = workload.streamed_bytes
    if limit is not None and any(block.bytes > limit for block in blocks.blocks):
        raise InputError(f"a group of {name} does not fit", field="limits.whole_parameter_bytes", value=limit)
    plan = place_gathers(workload, timing, blocks, Choices(inf, (ALL_GATHER,), frozenset()))
    return assemble(workload, blocks.groups, plan.placed, plan.freed, planner=name)


def hierarchical(workload: Workload, timing: Timing) -> Schedule:
    """As :func:`all_gpu`, but with hierarchical all-gathers in data-parallel groups that have a hierarchy.

    Raises:
        InputError: no data-parallel group has a hierarchy.
    """
    schedule = stock_schedule(workload)
    found = [has_hierarchy(workload.parallel, group.pp_rank, group.ranks) for group in schedule.groups]
    if not any(found):
        raise InputError(
            "no data-parallel group spans nodes with several ranks on each",
            field="parallel.gpus_per_node",
            value=workload.parallel.gpus_per_node,
        )
    groups = tuple(replace(one, algorithm=HIERARCHICAL if here else None) for one, here in zip(schedule.groups, found))
    return _named(replace(schedule, groups=groups), "hierarchical")


def gathers_only(workload: Workload, timing: Timing) -> Schedule:
    """The schedule that the search of ``hybrid`` finds with the route ``gpu`` alone.

    Raises:
        InputError: the search finds nothing that fits.
    """

    def find() -> Schedule:
        problem = Problem(workload, timing, (ALL_GATHER,), lower_bound(workload, timing))
        return _named(search(problem)[0], "gathers-only")

    return last_found("gathers_only", workload, timing, find)


def best_of_gathers(
    workload: Workload, timing: Timing, known_us: dict[str, float] | None = None
) -> tuple[str, Schedule, float] | None:
    """The fastest rule that uses all-gathers alone and fits the limits: its name, its schedule and its iteration time
    in microseconds. None if the table has no route ``gpu`` or no rule fits.

    Args:
        known_us: iteration times by name on the same costs, if they are known.
    """
    best = None
    names = [name for name, (needs, _) in BASELINES.items() if needs == {ALL_GATHER}]
    if known_us and any(name in known_us for name in names):
        names = [min((name for name in names if name in known_us), key=lambda name: known_us[name])]
    for name in names:
        try:
            schedule = BASELINES[name][1](workload, timing)
            validate(schedule)
            us = judged_us(workload, timing, schedule)
        except InputError:  # the rule does not work for these nodes, limits or measured sizes
            continue
        if best is None or us < best[2]:
            best = name, schedule, us
    return best


def check_pinned(workload: Workload, groups, hosted: Container[int]) -> None:
    """Raises InputError naming the node whose host copies exceed ``limits.pinned_host_bytes``."""
    limit = workload.limits.pinned_host_bytes
    for node, need, short in over_limit(pinned_need(workload, groups, hosted), limit):
        raise InputError(
            f"cannot fit: host copies on node {node} need {need} bytes, {short} bytes short; "
            f"policy hybrid gathers the groups without room by route {ALL_GATHER}",
            field="limits.pinned_host_bytes",
            value=limit,
        )


def _named(schedule: Schedule, name: str) -> Schedule:
    return replace(schedule, metadata=ScheduleMetadata(planner=name))


BASELINES = {
    "all-gpu": ({ALL_GATHER}, lambda workload, timing: all_gpu(workload)),
    "all-cpu": ({HOST_COPY}, lambda workload, timing: all_cpu(workload)),
    "window-1": ({ALL_GATHER}, lambda workload, timing: window(workload, 1)),
    "window-2": ({ALL_GATHER}, lambda workload, timing: window(workload, 2)),
    "share-25": ({ALL_GATHER, HOST_COPY}, lambda workload, timing: fixed_share(workload, 25)),
    "share-50": ({ALL_GATHER, HOST_COPY}, lambda workload, timing: fixed_share(workload, 50)),
    "share-75": ({ALL_GATHER, HOST_COPY}, lambda workload, timing: fixed_share(workload, 75)),
    "urgency": ({ALL_GATHER}, urgency),
    "pipeswitch": ({ALL_GATHER}, pipeswitch),
    "hierarchical": ({ALL_GATHER}, hierarchical),
    "gathers-only": ({ALL_GATHER}, gathers_only),
}
"""By name of the baseline: the routes that it needs, and its rule (workload, timing) -> schedule."""
