"""Checks that a schedule is for a workload."""

import re

from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.action_checks import InvalidSchedule
from megatron_ext.schedule.footprint import device_peaks, over_limit, pinned_host_bytes
from megatron_ext.schedule.group_facts import members_of, uses_of_groups
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.rest_checks import check_rests_of_run
from megatron_ext.schedule.user_defined_schedule import Group, Reshard, Schedule, Unshard
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.step import Step
from megatron_ext.workload.whole_gradients import may_rest_on_host
from megatron_ext.workload.workload import Parameter, Workload, fingerprint, group_bytes, group_ranks


def match(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse a (valid) schedule that was made for another workload.

    Raises:
        InputError: naming the first field of the schedule that differs, and both values.
    """
    check = Checker(file)
    match_parallel(schedule, workload.parallel, file=file)
    if schedule.zero_stage != workload.zero_stage:
        check.refuse(f"the run has {workload.zero_stage}", "zero_stage", schedule.zero_stage)
    names = ((chunk, p.name) for chunk in workload.chunks for p in chunk.parameters)
    layers = {(c.pp_rank, c.model_chunk_id, found[1]) for c, name in names if (found := _LAYER.search(name))}
    match_layers(schedule, len(layers), file=file)
    _match_groups(schedule, workload, check)
    if schedule.model.fingerprint != fingerprint(workload):
        said = f"the schedule was made for another model; the run's fingerprint is {fingerprint(workload)[:12]}"
        check.refuse(said, "model.fingerprint", schedule.model.fingerprint[:12])
    _check_whole_gradients(schedule, workload, check)
    check_rests_of_run(schedule, workload, check)
    check_layers(schedule, workload, file=file)
    _match_limits(schedule, workload, check)


def _check_whole_gradients(schedule: Schedule, workload: Workload, check: Checker) -> None:
    for index, group in enumerate(schedule.groups):
        members = members_of(group, workload)
        shared = workload.keeps_gradients or any(p.shared_embedding for p in members.parameters)
        if group.gradients is not None and shared:
            said = "the group keeps its gradient whole: it is changed or read when the schedule may not have it"
            check.refuse(said, f"groups[{index}].gradients", group.gradients)
        if group.gradients == "host" and not may_rest_on_host(members.dtype, workload.optimizer.on_host):
            said = "gradients of float16 in host memory would not be unscaled by the host's optimizer"
            check.refuse(said, f"groups[{index}].gradients", group.gradients)


_SIZES = {
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "num_microbatches": "num_microbatches",
    "order": "order",
    "microbatch_group_size": "microbatch_group_size_per_vp_stage",
    "node_size": "gpus_per_node",
}
"""Attribute of ``Parallel`` that is compared -> field of the file that an error names, in the order of comparison."""


def match_parallel(schedule: Schedule, parallel: Parallel, *, file=None) -> None:
    """Refuse a schedule for other parallel sizes. This check needs no model, so it can run first.

    Raises:
        InputError: naming the field, its value, and the run's value.
    """
    for name, field in _SIZES.items():
        have, run = getattr(schedule.parallel, name), getattr(parallel, name)
        if have != run:
            hint = "; if its launcher does not say it, export LOCAL_WORLD_SIZE" if name == "node_size" else ""
            Checker(file).refuse(f"the run has {run!r}{hint}", f"parallel.{field}", have)


_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")


def match_layers(schedule: Schedule, layers: int, *, file=None) -> None:
    """Refuse a schedule for a model of another depth. This runs before checks whose errors would be less clear.

    Args:
        layers: transformer layers of the whole model.

    Raises:
        InputError: with both numbers.
    """
    searched = ((group, _LAYER.search(name)) for group in schedule.groups for name in group.parameters)
    named = {(group.pp_rank, group.model_chunk_id, found[1]) for group, found in searched if found}
    if named and len(named) != layers:
        why = f"the schedule is for {len(named)} layers, the model has {layers}; run describe and plan with this"
        raise InputError(f"{why} training's options", file=file)


def _match_limits(schedule: Schedule, workload: Workload, check: Checker) -> None:
    """Refuse a schedule that exceeds the workload's limits, which may be lower than the schedule's own."""
    limits = workload.limits
    if limits.device_bytes is not None:
        check_device_bytes(schedule, workload, limits.device_bytes, file=check.file)
    for name, needs, text in (
        ("whole_parameter_bytes", device_peaks, "pipeline rank {} has up to {} bytes whole"),
        ("pinned_host_bytes", pinned_host_bytes, "node {} needs {} bytes of pinned host memory"),
    ):
        limit = getattr(limits, name)
        for index, need, _ in over_limit(needs(schedule), limit):
            said = f"{text.format(index, need)}, the workload allows {limit}"
            check.refuse(said, f"limits.{name}", getattr(schedule.limits, name))


def check_device_bytes(schedule: Schedule, workload: Workload, limit: int, *, file=None) -> None:
    """Refuse a schedule by which a rank holds more than ``limit`` bytes on its device.

    Raises:
        InputError: with the memory bill of the first such rank and the bytes that are missing.
    """
    for pp_rank, bill in enumerate(memory_bill(schedule, workload)):
        need = bill.memory.device_total_bytes
        if need > limit:
            kinds = ", ".join(f"{kind} {size}" for kind, size in bill.memory.device_bytes.items())
            said = f"pipeline rank {pp_rank} holds up to {need} bytes at step {bill.memory.at_step} ({kinds})"
            Checker(file).refuse(f"{said}, {need - limit} bytes short", "limits.device_bytes", limit)


def _match_groups(schedule: Schedule, workload: Workload, check: Checker) -> None:
    grouped: dict[tuple[int, int], set[str]] = {}
    for index, group in enumerate(schedule.groups):
        chunk = workload.chunk(group.pp_rank, group.model_chunk_id)
        by_name = {p.name: (n, p) for n, p in enumerate(chunk.parameters)}
        for name in group.parameters:
            if name not in by_name:
                said = f"the model has no such parameter in pipeline rank {group.pp_rank}, chunk {group.model_chunk_id}"
                check.refuse(said, f"groups[{index}].parameters", name)
        positions, members = zip(*(by_name[name] for name in group.parameters))
        if list(positions) != sorted(positions):
            check.refuse("parameters of a group must be in execution order", f"groups[{index}].parameters")
        _match_group(group, members, f"groups[{index}]", workload.parallel, check)
        grouped.setdefault((group.pp_rank, group.model_chunk_id), set()).update(group.parameters)
    for chunk in workload.chunks:
        have = grouped.get((chunk.pp_rank, chunk.model_chunk_id), ())
        for parameter in chunk.parameters:
            if parameter.name not in have:
                said = f"no group holds this parameter of pipeline rank {chunk.pp_rank}, chunk {chunk.model_chunk_id}"
                check.refuse(said, "groups", parameter.name)


def _match_group(group: Group, members: tuple[Parameter, ...], field: str, parallel: Parallel, check: Checker) -> None:
    """Refuse a group whose parameters do not belong together, or have other sizes in the model."""
    dtypes, size, ranks = {p.dtype for p in members}, group_bytes(members, parallel), group_ranks(members, parallel)
    if len(dtypes) > 1:
        check.refuse(f"mixes dtypes {sorted(dtypes)}; a bucket has one", f"{field}.parameters")
    if len({p.expert for p in members}) > 1:
        said = "mixes parameters of experts with others: they are sharded among other ranks"
        check.refuse(said, f"{field}.parameters")
    if group.ranks != ranks:
        said = f"in the model these parameters are sharded among {ranks} ranks"
        check.refuse(said, f"{field}.ranks", group.ranks)
    if len(members) > 1 and any(p.shared_embedding for p in members):
        check.refuse("the shared embedding must be a group of its own", f"{field}.parameters")
    if group.bytes != size:
        said = f"in the model these parameters take {size} (with Megatron's padding): another size or precision"
        check.refuse(said, f"{field}.bytes", group.bytes)


def check_layers(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse actions at layers that do not exist, unshards that come too late and reshards that come too early. Within
    a step a group must be unsharded before its first layer in the direction of the step, and freed after its last
    layer. Only the workload knows these layers.

    Args:
        schedule: valid, with the workload's groups.
        workload: what it is for.

    Raises:
        InvalidSchedule: naming the action.
    """
    uses = uses_of_groups(schedule.groups, workload)
    for rank in schedule.ranks:
        for index, entry in enumerate(rank.steps):
            step = Step.parse(entry.step)
            chunk = workload.chunk(rank.pp_rank, step.model_chunk_id(schedule.parallel.pp))
            for kind in ("unshard", "reshard"):
                for n, action in enumerate(getattr(entry, kind)):
                    group = schedule.groups[action.group]
                    span = uses[action.group] if group.model_chunk_id == chunk.model_chunk_id else None
                    if action.at >= 0 and (said := _wrong_layer(action, index, step.kind, chunk.num_layers, span)):
                        field = f"{kind}[{n}].at"
                        said = f"step {entry.step}: {said}"
                        raise InvalidSchedule.at_step(rank.pp_rank, index, said, field, action.at, file)


def _wrong_layer(
    action: Unshard | Reshard, index: int, kind: str, num_layers: int, span: tuple[int, int] | None
) -> str | None:
    """What is wrong with the layer of an action in step ``index``; None if nothing is. ``span``: the first and the last
    layer that use its group, if they belong to the step's chunk."""
    if action.at >= num_layers:
        return f"the chunk has {num_layers} layers"
    if span is None:
        return None
    sign, (first, last) = (-1, span[::-1]) if kind == "B" else (1, span)  # in the direction of the step
    if isinstance(action, Reshard):
        late = sign * action.at >= sign * last
        return None if late else f"layer {last} still computes on group {action.group} after that"
    early = action.need_by not in (-1, index) or sign * action.at <= sign * first
    return None if early else f"layer {first} computes on group {action.group} before that"
