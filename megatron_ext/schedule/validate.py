"""Checks whether a schedule may train: every use of a group must follow a finished gather of the same iteration
([Note: Life of a group within one iteration] in ``action_checks.py``)."""

from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.action_checks import InvalidSchedule, RankCheck
from megatron_ext.schedule.check_figures import check_figures
from megatron_ext.schedule.footprint import over_limit, pinned_host_bytes
from megatron_ext.schedule.rest_checks import check_rests
from megatron_ext.schedule.user_defined_schedule import Group, Rank, Schedule, read_unchecked
from megatron_ext.workload.nodes import algorithm_of_nodes, check_spread
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC
from megatron_ext.workload.step_order import steps_of_ranks


def load(path) -> Schedule:
    """Read and validate a schedule file.

    Raises:
        InputError: one line that names file, field and value.
    """
    return validate(read_unchecked(path), file=path)


def validate(schedule: Schedule, *, file=None) -> Schedule:
    """Check everything that can be checked without the workload, and return the schedule.

    Raises:
        InvalidSchedule: at the first place at which the schedule computes on parameters that are not
            whole and fresh, exceeds a limit, or differs from Megatron's order of steps.
    """
    check, parallel = Checker(file, InvalidSchedule), schedule.parallel
    parallel.check(file=file)
    _check_groups(schedule, check)
    destinations = _check_publish(schedule, check)
    check_rests(schedule, check)
    check_figures(schedule, check)
    if len(schedule.ranks) != parallel.pp:
        said = f"expected one entry for each of the {parallel.pp} pipeline ranks"
        check.refuse(said, "ranks", len(schedule.ranks))
    number = 2 * parallel.vp * parallel.num_microbatches
    for index, rank in enumerate(schedule.ranks):
        if len(rank.steps) != number:  # before the order is computed: refuse a small file quickly
            check.refuse(f"expected {number} steps", f"ranks[{index}].steps", len(rank.steps))
    expected = steps_of_ranks(parallel)
    for index, rank in enumerate(schedule.ranks):
        if rank.pp_rank != index:
            check.refuse(f"expected {index}: ranks are stored in order", f"ranks[{index}].pp_rank", rank.pp_rank)
        _check_steps(rank, expected[index], check)
        RankCheck(schedule, index, destinations, file).run()
    if schedule.publish:
        _check_host_copies(schedule, check)
    return schedule


_NEEDS = {
    HIERARCHICAL: "needs data-parallel groups that span nodes, with several ranks on each, and equally many on all",
    SYMMETRIC: "needs data-parallel groups of several ranks that share one node",
}


def _check_groups(schedule: Schedule, check: Checker) -> None:
    owner: dict[tuple[int, int, str], int] = {}
    for index, group in enumerate(schedule.groups):
        field = f"groups[{index}]"
        _check_group(schedule, group, field, check)
        for name in group.parameters:
            key = (group.pp_rank, group.model_chunk_id, name)
            if key in owner:
                check.refuse(f"is in two groups, {owner[key]} and {index}", f"{field}.parameters", name)
            owner[key] = index


def _check_group(schedule: Schedule, group: Group, field: str, check: Checker) -> None:
    parallel, zero_stage, visits = schedule.parallel, schedule.zero_stage, schedule.parallel.num_microbatches
    parallel.check_place(group.pp_rank, group.model_chunk_id, file=check.file, field=field, error=InvalidSchedule)
    if group.bytes <= 0:
        check.refuse("must be positive", f"{field}.bytes", group.bytes)
    if group.ranks not in (parallel.dp, parallel.expert_dp):
        apart = f" or {parallel.expert_dp} expert-data-parallel" if parallel.expert_dp != parallel.dp else ""
        said = f"expected {parallel.dp} data-parallel ranks{apart}, which share its shards"
        check.refuse(said, f"{field}.ranks", group.ranks)
    if group.algorithm not in (None, algorithm_of_nodes(parallel, group.pp_rank, group.ranks)):
        check.refuse(_NEEDS[group.algorithm], f"{field}.algorithm", group.algorithm)
    if group.shard_rests == "host" and zero_stage < 3:
        said = f"zero stage {zero_stage} keeps whole groups, and the shards in them, on the device"
        check.refuse(said, f"{field}.shard_rests", group.shard_rests)
    if group.gradients is not None and zero_stage == 1:
        check.refuse("zero stage 1 keeps whole gradients: use zero stage 2 or 3", f"{field}.gradients", group.gradients)
    if group.gradients is None and group.alone:
        check.refuse("gradients that stay whole are allocated once", f"{field}.alone", True)
    if group.gradients is None and group.reduce_every != 1:
        said = "gradients that stay whole are reduced once an iteration"
        check.refuse(said, f"{field}.reduce_every", group.reduce_every)
    if not 1 <= group.reduce_every <= visits:
        said = f"expected 1 to {visits}, the backward steps of the chunk in an iteration"
        check.refuse(said, f"{field}.reduce_every", group.reduce_every)
    if not group.parameters:
        check.refuse("a group needs at least one parameter", f"{field}.parameters")


def _check_publish(schedule: Schedule, check: Checker) -> dict[int, set[str]]:
    destinations: dict[int, set[str]] = {}
    for index, entry in enumerate(schedule.publish):
        field = f"publish[{index}]"
        if not 0 <= entry.group < len(schedule.groups):
            check.refuse(f"there are {len(schedule.groups)} groups", f"{field}.group", entry.group)
        if entry.group in destinations:
            check.refuse("is published twice", f"{field}.group", entry.group)
        if not entry.to or len(set(entry.to)) != len(entry.to):
            check.refuse("expected cpu, nvme or both", f"{field}.to", list(entry.to))
        destinations[entry.group] = set(entry.to)
    return destinations


def _check_host_copies(schedule: Schedule, check: Checker) -> None:
    """Host copies need the same number of replicas on every node, and memory within ``limits.pinned_host_bytes``."""
    try:
        check_spread(schedule.parallel)
    except InputError as error:
        check.refuse(error.message, error.field, error.value)
    limit = schedule.limits.pinned_host_bytes
    for node, need, more in over_limit(pinned_host_bytes(schedule), limit):
        said = f"node {node} needs {need} bytes of pinned host memory, {more} more than allowed"
        check.refuse(said, "limits.pinned_host_bytes", limit)


def _check_steps(rank: Rank, expected, check: Checker) -> None:
    for index, (entry, step) in enumerate(zip(rank.steps, expected)):
        if entry.step != str(step):
            said = f"Megatron runs {step} here"
            raise InvalidSchedule.at_step(rank.pp_rank, index, said, "step", entry.step, check.file)
