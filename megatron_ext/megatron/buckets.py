"""Give every group of the schedule a bucket and a storage of its own.

[Note: Why buckets are laid out again]
Megatron buckets only the first chunk of the first pipeline rank; every other chunk is one
bucket, and all buckets of a chunk are views of one storage. A group can travel by itself, and
be freed by itself, only if it is a bucket with its own storage. This runs at the end of
DistributedDataParallel.__init__: parameters exist, the optimizer has not taken its views yet.

Another bucket layout changes the order in which gradient norms are summed, hence the last
bits: equality is checked against Megatron's own gather at this same layout.
"""

import inspect

import torch
from megatron.core.distributed import param_and_grad_buffer as upstream

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.bucket_layout import PARAMETER_ALIGNMENT, bucket_numel


def parameter_names(ddp) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters of a DDP chunk by their name in the bare model."""
    names = {}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad:
            while name.startswith("module."):  # precision wrappers
                name = name[len("module.") :]
            names[name] = parameter
    return names


def lay_out(
    ddp, groups: dict[int, Group], *, file, bucket_group_class=upstream._ParamAndGradBucketGroup
) -> dict[int, object]:
    """Lay the buckets of ``ddp`` out by ``groups`` and return the bucket groups by group index.

    Args:
        ddp: a Megatron DistributedDataParallel whose ``__init__`` is about to end.
        groups: the schedule's groups of this chunk, by index, in execution order.
        file: the schedule's path, for errors.
        bucket_group_class: what to make of each bucket.

    Raises:
        InputError: the schedule's groups and the chunk's parameters differ; nothing changed.
    """
    names = parameter_names(ddp)
    if getattr(ddp, "expert_parallel_buffers", None):
        raise InputError("expert-parallel parameters cannot be scheduled", file=file, field="groups")
    members = {index: _members(index, group, names, file) for index, group in groups.items()}
    placed = {id(parameter) for parameters in members.values() for parameter in parameters}
    for name, parameter in names.items():
        if id(parameter) not in placed:
            raise InputError("no group holds this parameter of the model", file=file, field="groups", value=name)
    if not groups:
        return {}

    by_index = {}
    ordered = []
    for buffer in ddp.buffers:
        own = {id(parameter) for parameter in buffer.params}
        # Buckets lie in the order in which gradients get ready: backwards.
        indices = [index for index in reversed(groups) if id(members[index][0]) in own]
        for index in indices:
            if any(id(parameter) not in own for parameter in members[index]):
                raise InputError("mixes dtypes; a bucket has one", file=file, field=f"groups[{index}].parameters")
        _lay_out_buffer(buffer, {index: members[index] for index in indices})
        for index, bucket in zip(indices, buffer.buckets):
            bucket_group = bucket_group_class(
                [bucket], buffer.ddp_config, buffer.data_parallel_group, buffer.data_parallel_world_size
            )
            by_index[index] = bucket_group
            ordered.append(bucket_group)

    ddp.bucket_groups = ordered
    if ddp.ddp_config.use_distributed_optimizer and ddp.ddp_config.overlap_param_gather:
        for later, earlier in zip(ordered[1:], ordered[:-1]):
            later.next_param_gather_bucket_group = earlier
    ddp.param_to_bucket_group = {parameter: group for group in ordered for parameter in group.params}
    return by_index


def _members(index: int, group: Group, names, file) -> list[torch.nn.Parameter]:
    members = []
    for name in group.parameters:
        if name not in names:
            raise InputError(
                f"the model has no such parameter in pipeline rank {group.pp_rank}, chunk {group.model_chunk_id}",
                file=file,
                field=f"groups[{index}].parameters",
                value=name,
            )
        members.append(names[name])
    if len(members) > 1 and any(getattr(parameter, "shared_embedding", False) for parameter in members):
        raise InputError(
            "the shared embedding must be a group of its own", file=file, field=f"groups[{index}].parameters"
        )
    return members


def _lay_out_buffer(buffer, members: dict[int, list[torch.nn.Parameter]]) -> None:
    """Replace a buffer's buckets by one bucket a group, each with its own parameter storage.

    Gradients stay in one storage: they are reduced by bucket and zeroed together.
    """
    dp = buffer.data_parallel_world_size
    ranges, index_map, start = [], {}, 0
    for bucket_id, parameters in enumerate(members.values()):
        position = start
        for parameter in reversed(parameters):
            position += -position % PARAMETER_ALIGNMENT
            index_map[parameter] = (position, position + parameter.numel(), bucket_id)
            position += parameter.numel()
        end = start + bucket_numel([parameter.numel() for parameter in parameters], dp)
        ranges.append((start, end, position - start))
        start = end

    assert set(index_map) == set(buffer.params)
    device, grad_dtype = buffer.grad_data.device, buffer.grad_data.dtype
    buffer.grad_data = None  # the old gradients go before the new ones are made
    for parameter in buffer.params:
        parameter.main_grad = None
    buffer.numel, buffer.numel_unpadded = start, sum(unpadded for _, _, unpadded in ranges)
    buffer.bucket_indices = [(begin, end) for begin, end, _ in ranges]
    buffer.param_index_map = index_map
    buffer.param_to_bucket, buffer.buckets = {}, []
    buffer.grad_data = torch.zeros(start, dtype=grad_dtype, device=device)
    buffer.param_data = None  # every bucket has its own
    # From 0.18 on a bucket also lists parameters with gradients of their own in fp32; refused at start.
    accepted = inspect.signature(buffer._new_bucket).parameters
    none_extra = {name: [] for name in ("bucket_params_with_extra_main_grads",) if name in accepted}
    for bucket_id, (parameters, (begin, end, unpadded)) in enumerate(zip(members.values(), ranges)):
        storage = torch.zeros(end - begin, dtype=buffer.param_dtype, device=device)
        for parameter in parameters:
            first, last, _ = index_map[parameter]
            with torch.no_grad():
                view = storage[first - begin : last - begin].view(parameter.shape)
                view.copy_(parameter.data)
                parameter.data = view
            vars(parameter)["main_grad"] = buffer.grad_data[first:last].view(parameter.shape)
        bucket = buffer._new_bucket(
            bucket_params=list(reversed(parameters)),
            start_index=begin,
            end_index=end,
            numel_unpadded=unpadded,
            bucket_id=bucket_id,
            **none_extra,
        )
        bucket.param_data = storage
        buffer.buckets.append(bucket)


class ScheduledBucketGroup(upstream._ParamAndGradBucketGroup):
    """A bucket group whose parameters are gathered by the schedule, not by module hooks.

    Gradient reduction stays Megatron's. Whoever asks for parameters outside of the schedule
    (``force_sync``: evaluation, checkpoints, hashes) gets all of them whole.
    """

    executor = None

    def start_grad_sync(self, *args, **kwargs):
        if self.executor is None:
            raise ScheduleError(
                "training goes on without its schedule: megatron_ext.megatron.hooks.on_train_setup was not called, "
                "or finish was"
            )
        return super().start_grad_sync(*args, **kwargs)

    def start_param_sync(self, force_sync: bool = False):
        if force_sync and self.executor is not None:
            self.executor.unshard_all()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False):
        """Nothing to finish: the program waits for groups."""
