"""Is this schedule the schedule of this workload?"""

from megatron_ext.errors import InputError
from megatron_ext.schedule.footprint import device_peaks, pinned_host_bytes
from megatron_ext.schedule.layer_use import check_layers
from megatron_ext.schedule.model import Schedule
from megatron_ext.workload.model import Workload, fingerprint, group_bytes
from megatron_ext.workload.parallel import Parallel


def match(schedule: Schedule, workload: Workload, *, file=None) -> None:
    """Refuse a (valid) schedule that was made for something else.

    Raises:
        InputError: naming the first field of the schedule that differs, and both values.
    """
    match_parallel(schedule, workload.parallel, file=file)
    if schedule.zero_stage != workload.zero_stage:
        raise InputError(f"the run has {workload.zero_stage}", file=file, field="zero_stage", value=schedule.zero_stage)
    _match_groups(schedule, workload, file)
    if schedule.model.fingerprint != fingerprint(workload):
        raise InputError(f"made for another model; the run's is {fingerprint(workload)[:12]}", file=file, field="model.fingerprint", value=schedule.model.fingerprint[:12])
    check_layers(schedule, workload, file=file)
    _match_limits(schedule, workload, file)


def match_parallel(schedule: Schedule, parallel: Parallel, *, file=None) -> None:
    """Refuse a schedule for other parallel sizes; needs no model, so it can run first of all.

    Raises:
        InputError: naming the field, its value, and the run's.
    """
    ours, theirs = schedule.parallel, parallel
    for name in ("pp", "vp", "dp", "tensor_model_parallel_size", "num_microbatches", "order", "microbatch_group_size", "node_size"):
        have, run = getattr(ours, name), getattr(theirs, name)
        if have != run:
            field = {"pp": "pipeline_model_parallel_size", "vp": "virtual_pipeline_model_parallel_size", "dp": "data_parallel_size", "microbatch_group_size": "microbatch_group_size_per_vp_stage", "node_size": "gpus_per_node"}.get(name, name)
            raise InputError(f"the run has {run!r}", file=file, field=f"parallel.{field}", value=have)


def _match_limits(schedule: Schedule, workload: Workload, file) -> None:
    """The schedule keeps its own limits; a workload may have others."""
    limits = workload.limits
    if limits.device_bytes is not None:
        for pp_rank, need in enumerate(device_peaks(schedule)):
            if need > limits.device_bytes:
                raise InputError(f"pipeline rank {pp_rank} has up to {need} bytes whole, the workload allows {limits.device_bytes}", file=file, field="limits.device_bytes", value=schedule.limits.device_bytes)
    if limits.pinned_host_bytes is not None:
        for node, need in enumerate(pinned_host_bytes(schedule)):
            if need > limits.pinned_host_bytes:
                raise InputError(f"node {node} needs {need} bytes of pinned host memory, the workload allows {limits.pinned_host_bytes}", file=file, field="limits.pinned_host_bytes", value=schedule.limits.pinned_host_bytes)


def _match_groups(schedule: Schedule, workload: Workload, file) -> None:
    grouped: dict[tuple[int, int], dict[str, int]] = {}
    for index, group in enumerate(schedule.groups):
        chunk = workload.chunk(group.pp_rank, group.model_chunk_id)
        by_name = {p.name: (n, p) for n, p in enumerate(chunk.parameters)}
        field = f"groups[{index}].parameters"
        positions, members = [], []
        for name in group.parameters:
            if name not in by_name:
                raise InputError(f"the model has no such parameter in pipeline rank {group.pp_rank}, chunk {group.model_chunk_id}", file=file, field=field, value=name)
            position, parameter = by_name[name]
            positions.append(position)
            members.append(parameter)
        if positions != sorted(positions):
            raise InputError("parameters of a group must be in execution order", file=file, field=field)
        if len({p.dtype for p in members}) > 1:
            raise InputError(f"mixes dtypes {sorted({p.dtype for p in members})}; a bucket has one", file=file, field=field)
        if len(members) > 1 and any(p.shared_embedding for p in members):
            raise InputError("the shared embedding must be a group of its own", file=file, field=field)
        if group.bytes != group_bytes(members, workload.parallel.dp):
            raise InputError(f"with Megatron's padding it is {group_bytes(members, workload.parallel.dp)}", file=file, field=f"groups[{index}].bytes", value=group.bytes)
        grouped.setdefault((group.pp_rank, group.model_chunk_id), {}).update(dict.fromkeys(group.parameters, index))
    for chunk in workload.chunks:
        have = grouped.get((chunk.pp_rank, chunk.model_chunk_id), {})
        for parameter in chunk.parameters:
            if parameter.name not in have:
                raise InputError(f"no group holds this parameter of pipeline rank {chunk.pp_rank}, chunk {chunk.model_chunk_id}", file=file, field="groups", value=parameter.name)
