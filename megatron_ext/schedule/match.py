"""Checks that a schedule is for a workload."""

import re

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.footprint import device_peaks, over_limit, pinned_host_bytes
from megatron_ext.schedule.host_shards import check_host_shards
from megatron_ext.schedule.layer_use import check_layers
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.state_placement import check_states
from megatron_ext.schedule.step_slots import check_steps_through_slots
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Workload, fingerprint, group_bytes, group_ranks


def match(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse a (valid) schedule that was made for something else.

    Raises:
        InputError: naming the first field of the schedule that differs, and both values.
    """
    match_parallel(schedule, workload.parallel, file=file)
    if schedule.zero_stage != workload.zero_stage:
        raise InputError(f"the run has {workload.zero_stage}", file=file, field="zero_stage", value=schedule.zero_stage)
    match_layers(schedule, _layers_of(workload), file=file)
    _match_groups(schedule, workload, file)
    if schedule.model.fingerprint != fingerprint(workload):
        raise InputError(
            f"made for another model; the run's is {fingerprint(workload)[:12]}",
            file=file,
            field="model.fingerprint",
            value=schedule.model.fingerprint[:12],
        )
    check_host_shards(schedule, workload, file=file)
    _check_shared_embedding(schedule, workload, file)
    check_states(schedule, workload, file=file)
    check_steps_through_slots(schedule, workload, file=file)
    check_layers(schedule, workload, file=file)
    _match_limits(schedule, workload, file)


def _check_shared_embedding(schedule: Schedule, workload: Workload, file) -> None:
    for index, group in enumerate(schedule.groups):
        if group.gradients is None:
            continue
        chunk = workload.chunk(group.pp_rank, group.model_chunk_id)
        if any(p.shared_embedding for p in chunk.parameters if p.name in group.parameters):
            raise InputError(
                "the embedding that two pipeline ranks share keeps its gradient whole: Megatron adds both ranks' after "
                "all others are reduced",
                file=file,
                field=f"groups[{index}].gradients",
                value=group.gradients,
            )


def match_parallel(schedule: Schedule, parallel: Parallel, *, file=None) -> None:
    """Refuse a schedule for other parallel sizes; needs no model, so it can run first of all.

    Raises:
        InputError: naming the field, its value, and the run's.
    """
    ours, theirs = schedule.parallel, parallel
    for name in (
        "pp",
        "vp",
        "dp",
        "tensor_model_parallel_size",
        "ep",
        "etp",
        "num_microbatches",
        "order",
        "microbatch_group_size",
        "node_size",
    ):
        have, run = getattr(ours, name), getattr(theirs, name)
        if have != run:
            field = {
                "pp": "pipeline_model_parallel_size",
                "vp": "virtual_pipeline_model_parallel_size",
                "dp": "data_parallel_size",
                "ep": "expert_model_parallel_size",
                "etp": "expert_tensor_parallel_size",
                "microbatch_group_size": "microbatch_group_size_per_vp_stage",
                "node_size": "gpus_per_node",
            }.get(name, name)
            raise InputError(f"the run has {run!r}", file=file, field=f"parallel.{field}", value=have)


_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")


def match_layers(schedule: Schedule, layers: int, *, file=None) -> None:
    """Refuse a schedule for a model of another depth, before other differences that would say less.

    Args:
        layers: transformer layers of the whole model.

    Raises:
        InputError: with both numbers.
    """
    named = {
        (group.pp_rank, group.model_chunk_id, found[1])
        for group in schedule.groups
        for found in map(_LAYER.search, group.parameters)
        if found
    }
    if named and len(named) != layers:
        raise InputError(
            f"the schedule is for {len(named)} layers, the model has {layers}; run describe and plan with this "
            "training's options",
            file=file,
        )


def _match_limits(schedule: Schedule, workload: Workload, file) -> None:
    """The schedule keeps its own limits; a workload may have others."""
    limits = workload.limits
    if limits.device_bytes is not None:
        check_device_bytes(schedule, workload, limits.device_bytes, file=file)
    for name, needs, text in (
        ("whole_parameter_bytes", device_peaks, "pipeline rank {} has up to {} bytes whole"),
        ("pinned_host_bytes", pinned_host_bytes, "node {} needs {} bytes of pinned host memory"),
    ):
        limit = getattr(limits, name)
        for index, need, _ in over_limit(needs(schedule), limit):
            said = f"{text.format(index, need)}, the workload allows {limit}"
            raise InputError(said, file=file, field=f"limits.{name}", value=getattr(schedule.limits, name))


def check_device_bytes(schedule: Schedule, workload: Workload, limit: int, *, file=None) -> None:
    """Refuse a schedule by which a rank holds more than ``limit`` bytes on its device.

    Raises:
        InputError: with the memory bill of the first such rank and the bytes that are missing.
    """
    for pp_rank, bill in enumerate(memory_bill(schedule, workload)):
        need = bill.memory.device_total_bytes
        if need > limit:
            kinds = ", ".join(f"{kind} {size}" for kind, size in bill.memory.device_bytes.items())
            raise InputError(
                f"pipeline rank {pp_rank} holds up to {need} bytes at step {bill.memory.at_step} ({kinds}), "
                f"{need - limit} bytes short",
                file=file,
                field="limits.device_bytes",
                value=limit,
            )


def _layers_of(workload: Workload) -> int:
    """Transformer layers of the whole model."""
    names = ((chunk, p.name) for chunk in workload.chunks for p in chunk.parameters)
    return len({(c.pp_rank, c.model_chunk_id, found[1]) for c, name in names if (found := _LAYER.search(name))})


def _match_groups(schedule: Schedule, workload: Workload, file) -> None:
    grouped: dict[tuple[int, int], dict[str, int]] = {}
    for index, group in enumerate(schedule.groups):
        chunk = workload.chunk(group.pp_rank, group.model_chunk_id)
        by_name = {p.name: (n, p) for n, p in enumerate(chunk.parameters)}
        field = f"groups[{index}].parameters"
        positions, members = [], []
        for name in group.parameters:
            if name not in by_name:
                raise InputError(
                    f"the model has no such parameter in pipeline rank {group.pp_rank}, chunk {group.model_chunk_id}",
                    file=file,
                    field=field,
                    value=name,
                )
            position, parameter = by_name[name]
            positions.append(position)
            members.append(parameter)
        if positions != sorted(positions):
            raise InputError("parameters of a group must be in execution order", file=file, field=field)
        if len({p.dtype for p in members}) > 1:
            raise InputError(
                f"mixes dtypes {sorted({p.dtype for p in members})}; a bucket has one", file=file, field=field
            )
        if len({p.expert for p in members}) > 1:
            raise InputError(
                "mixes parameters of experts with others: they are sharded among other ranks", file=file, field=field
            )
        if group.ranks != group_ranks(members, workload.parallel):
            said = f"in the model these parameters are sharded among {group_ranks(members, workload.parallel)} ranks"
            raise InputError(said, file=file, field=f"groups[{index}].ranks", value=group.ranks)
        if len(members) > 1 and any(p.shared_embedding for p in members):
            raise InputError("the shared embedding must be a group of its own", file=file, field=field)
        if group.bytes != group_bytes(members, workload.parallel):
            raise InputError(
                f"in the model these parameters take {group_bytes(members, workload.parallel)} (with Megatron's "
                "padding): another size or precision",
                file=file,
                field=f"groups[{index}].bytes",
                value=group.bytes,
            )
        grouped.setdefault((group.pp_rank, group.model_chunk_id), {}).update(dict.fromkeys(group.parameters, index))
    for chunk in workload.chunks:
        have = grouped.get((chunk.pp_rank, chunk.model_chunk_id), {})
        for parameter in chunk.parameters:
            if parameter.name not in have:
                raise InputError(
                    f"no group holds this parameter of pipeline rank {chunk.pp_rank}, chunk {chunk.model_chunk_id}",
                    file=file,
                    field="groups",
                    value=parameter.name,
                )
