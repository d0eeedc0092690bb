"""Give every group of the schedule a bucket and a storage of its own.

[Note: Why buckets are laid out again]
Megatron divides only the first chunk of the first pipeline rank into buckets. Every other chunk is one
bucket, and all buckets of a chunk are views of one storage. A group can be gathered and freed
by itself only if it is a bucket with its own storage. This runs at the end of
DistributedDataParallel.__init__: parameters exist, and the optimizer has not taken its views yet.

Another bucket layout changes the order in which gradient norms are summed, and so their last
bits. Equality is therefore checked against Megatron's own gather at this same layout.

[Note: Where gradients begin]
Kernels on a device that add up squares read four elements at once from aligned addresses, and add in another order
from other addresses. So the tensors that they read must begin where they do in Megatron's buffer, modulo four elements.
Up to 32 data-parallel ranks this holds without further care; with 64, shards can have any number of elements.
Source: Transformer Engine, ``common/multi_tensor/l2norm.cu``; ATen, ``native/cuda/Reduce.cuh``.

[Note: Where gradients are added]
Megatron's training wraps chunks on a stream of their own, from core_v0.14 on. torch runs the hooks that add gradients
to ``main_grad`` on the stream on which DistributedDataParallel made them. Only the end of a backward waits for it. A
reduce that the program begins within a backward, on the compute stream, has to wait for it too.
Source: PyTorch, ``InputMetadata`` of ``AccumulateGrad``.
"""

from functools import partial

import torch
from megatron.core.distributed import param_and_grad_buffer as upstream

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.boundaries import bare
from megatron_ext.megatron.late_model import LateModel
from megatron_ext.megatron.releases import accepted
from megatron_ext.megatron.scheduled_bucket_group import ScheduledBucketGroup, instances_of
from megatron_ext.runtime import free_host_memory
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.gradients import Gradient
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.bucket_layout import PARAMETER_ALIGNMENT, bucket_numel

READ_AT_ONCE = 4
"""Elements that a kernel reads at once, see [Note: Where gradients begin]."""


def parameter_names(ddp) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters of a DDP chunk by their name in the bare model."""
    return {name: parameter for name, parameter in bare(ddp).named_parameters() if parameter.requires_grad}


def is_expert(parameter) -> bool:
    """Whether a parameter belongs to the rank's own experts, which are sharded over other ranks than the rest."""
    return not getattr(parameter, "allreduce", True)


def buffers_of(ddp) -> list:
    """All buffers of a DDP chunk; those of experts come last."""
    return [*ddp.buffers, *getattr(ddp, "expert_parallel_buffers", ())]


def lay_out_buckets(
    ddp,
    groups: dict[int, Group],
    *,
    file,
    bucket_group_class=upstream._ParamAndGradBucketGroup,
    late: LateModel | None = None,
) -> dict[int, object]:
    """Lay out the buckets of ``ddp`` by ``groups``, and return the bucket groups by group index.

    Args:
        ddp: a Megatron DistributedDataParallel whose ``__init__`` is about to end.
        groups: the schedule's groups of this chunk, by index.
        file: the schedule's path, for errors.
        bucket_group_class: the class of the bucket group that each bucket gets.
        late: takes each group as soon as it has its values; None: all groups stay whole.

    Raises:
        InputError: the schedule is for other parameters, and nothing has changed. Or host memory cannot be page-locked:
            the collectives were completed, but the chunk cannot be used.
    """
    members = _members_of_groups(ddp, groups, file)
    if not groups:
        return {}

    indices_of_buffers = [groups_by_bucket(buffer, members) for buffer in buffers_of(ddp)]
    for buffer, indices in zip(buffers_of(ddp), indices_of_buffers, strict=True):
        for index in reversed(indices):
            _check_buffer(index, groups[index], members[index], buffer, file)
    kept = {index: group.gradients for index, group in groups.items() if group.gradients is not None}
    if not issubclass(bucket_group_class, ScheduledBucketGroup):
        kept = {}  # Megatron's own bucket groups keep whole gradients
    instances = _instances(ddp)
    _drop_old(ddp)
    by_index, refused = {}, []
    added = device_of(next(iter(members.values()))[0]).joined()  # see [Note: Where gradients are added]
    ordered: dict[bool, list] = {False: [], True: []}  # by whether they are of experts
    for buffer, indices in zip(buffers_of(ddp), indices_of_buffers):
        of_kind = instances.get(is_expert(buffer.params[0]), {})
        try:
            _lay_out_buffer(buffer, {index: members[index] for index in indices}, kept, late, of_kind.get(INSTANCES))
        except InputError as error:
            refused.append(error)
            continue
        for index, bucket in zip(indices, buffer.buckets):
            bucket_group = bucket_group_class(
                [bucket], buffer.ddp_config, buffer.data_parallel_group, buffer.data_parallel_world_size
            )
            vars(bucket_group).update(of_kind)
            if of_kind:
                vars(bucket_group)["start_grad_sync"] = partial(_start_behind_hooks, bucket_group.start_grad_sync)
            if (gradient := getattr(bucket, "gradient", None)) is not None:
                assert isinstance(bucket_group, ScheduledBucketGroup)
                bucket_group.gradient, gradient.issue = gradient, partial(bucket_group.issue_reduce, added)
            by_index[index] = bucket_group
            ordered[is_expert(buffer.params[0])].append(bucket_group)
    if refused:
        raise refused[0]
    _take(ddp, by_index, ordered)
    return by_index


def _take(ddp, by_index: dict, ordered: dict[bool, list]) -> None:
    """Give ``ddp`` its new bucket groups; ``ordered``: by whether they are of experts."""
    ddp.bucket_groups, ddp.expert_parallel_bucket_groups = ordered[False], ordered[True]
    for own in ordered.values():  # refuse_ddp_config requires overlap_param_gather, for which Megatron sets this order
        for later, earlier in zip(own[1:], own[:-1]):
            later.next_param_gather_bucket_group = earlier
    ddp.param_to_bucket_group = {parameter: group for group in by_index.values() for parameter in group.params}
    if next(iter(by_index.values())).buckets[0].param_data.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the old buckets' blocks, which have other sizes


INSTANCES = "inter_distributed_optimizer_instance_group"
"""Megatron's name, in a bucket group, for the ranks that hold the same shard in other optimizer instances."""


def _instances(ddp) -> dict[bool, dict[str, object]]:
    """The attributes with which Megatron's bucket groups reduce across optimizer instances, by whether the groups are
    of experts; empty dictionaries if there is one instance."""
    kinds = {False: ddp.bucket_groups, True: getattr(ddp, "expert_parallel_bucket_groups", ())}
    names = (INSTANCES, "communication_stream") if instances_of(ddp.ddp_config) > 1 else ()
    return {experts: {name: getattr(own[0], name) for name in names} for experts, own in kinds.items() if own}


def _start_behind_hooks(start, *args, **kwargs) -> None:
    """Begin a reduce over instances on the default stream, behind the hook that begins it. Before core_v0.17 the stream
    of these reduces waits for the default stream only; the hook adds and scales gradients on another stream."""
    torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(torch.cuda.default_stream()):
        start(*args, **kwargs)


def lie_in_order(ddp, groups: dict[int, Group]) -> bool:
    """Whether the parameters of each group follow each other in Megatron's buffers."""
    names = parameter_names(ddp)
    places = {id(one): place for buffer in buffers_of(ddp) for place, one in enumerate(buffer.params)}
    own = [sorted(places[id(names[name])] for name in group.parameters if name in names) for group in groups.values()]
    return all(found[-1] - found[0] < len(found) for found in own if found)


def groups_by_bucket(buffer, members: dict[int, list[torch.nn.Parameter]]) -> list[int]:
    """The groups of a buffer in the order of their buckets: that in which gradients become ready, reversed. The order
    in the schedule does not matter, because a checkpoint stores optimizer states by their place in the buffer."""
    by_first = {id(parameters[0]): index for index, parameters in members.items()}
    return [by_first[id(parameter)] for parameter in reversed(buffer.params) if id(parameter) in by_first]


def _members_of_groups(ddp, groups: dict[int, Group], file) -> dict[int, list[torch.nn.Parameter]]:
    """The parameters of every group; refuses a parameter that the chunk lacks, or that is in no group."""
    names = parameter_names(ddp)
    members = {}
    for index, group in groups.items():
        absent = next((name for name in group.parameters if name not in names), None)
        if absent is not None:
            why = f"the model has no such parameter in pipeline rank {group.pp_rank}, chunk {group.model_chunk_id}"
            raise InputError(why, file=file, field=f"groups[{index}].parameters", value=absent)
        members[index] = [names[name] for name in group.parameters]
    placed = {id(parameter) for parameters in members.values() for parameter in parameters}
    for name, parameter in names.items():
        if id(parameter) not in placed:
            raise InputError("this parameter of the model is in no group", file=file, field="groups", value=name)
    return members


def _check_buffer(index: int, group: Group, members: list, buffer, file) -> None:
    """Refuse a group whose parameters do not all lie in ``buffer``, or are sharded over another number of ranks."""
    own, field = {id(parameter) for parameter in buffer.params}, f"groups[{index}]"
    apart = next((parameter for parameter in members if id(parameter) not in own), None)
    if apart is not None:
        experts = "parameters of experts with others: those are sharded over other ranks"
        what = experts if is_expert(apart) != is_expert(members[0]) else "dtypes; a group must have one"
        raise InputError(f"mixes {what}", file=file, field=f"{field}.parameters")
    if group.ranks != buffer.data_parallel_world_size:
        why = f"in this run its parameters are sharded over {buffer.data_parallel_world_size} ranks"
        raise InputError(why, file=file, field=f"{field}.ranks", value=group.ranks)


def require_host_memory(ddp, groups: dict[int, Group], ranks_of_node: int) -> None:
    """Refuse gradients that are added up in host memory if it is too small, before :func:`lay_out_buckets` allocates
    them.

    Args:
        ranks_of_node: how many ranks allocate memory on the same node.

    Raises:
        InputError: on this rank; ranks on other nodes may have enough memory.
    """
    names = {name for group in groups.values() if group.gradients == "host" for name in group.parameters}
    parameters = {id(parameter) for name, parameter in parameter_names(ddp).items() if name in names}
    for buffer in buffers_of(ddp) if parameters else ():
        if numel := sum(parameter.numel() for parameter in buffer.params if id(parameter) in parameters):
            of_rank = numel * buffer.grad_dtype.itemsize // buffer.data_parallel_world_size
            free_host_memory.require(of_rank * ranks_of_node, "gradients that are added up there")


def _drop_old(ddp) -> None:
    """Drop all references to Megatron's buckets and gradients, so that their memory is free before ours is allocated.

    Parameters keep their values in the old storage until they are moved.
    """
    ddp.bucket_groups, ddp.expert_parallel_bucket_groups, ddp.param_to_bucket_group = [], [], {}
    for buffer in buffers_of(ddp):
        buffer.buckets, buffer.param_to_bucket = [], {}
        buffer.grad_data = None
        for parameter in buffer.params:
            vars(parameter)["main_grad"] = None


def _lay_out_buffer(
    buffer, members: dict[int, list[torch.nn.Parameter]], kept: dict[int, str], late: LateModel | None, instances
) -> None:
    """Replace a buffer's buckets by one bucket per group, each with its own parameter storage.

    Gradients that stay whole, and shards of gradients on the device, lie in one storage: they are zeroed and scaled
    together. For groups whose gradients come and go, ``kept`` says where the shards of these gradients are.
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
    device = next(iter(index_map)).device
    buffer.numel, buffer.numel_unpadded = start, sum(unpadded for _, _, unpadded in ranges)
    buffer.grad_numel = start  # counted separately from parameters, for 4-bit parameters
    buffer.bucket_indices = [(begin, end) for begin, end, _ in ranges]
    buffer.param_index_map = index_map
    storages = _move_parameters(buffer, members, ranges, device, late, instances)
    gradients = resting_gradients(buffer, ranges, [kept.get(index) for index in members], device)
    none_extra = accepted(buffer._new_bucket, bucket_params_with_extra_main_grads=[])  # those are refused at start
    resting, buffer.grad_data = buffer.grad_data, buffer.grad_data.new_zeros(1).expand(start)
    for bucket_id, (index, (begin, end, unpadded)) in enumerate(zip(members, ranges)):
        bucket = buffer._new_bucket(
            bucket_params=list(reversed(members[index])),
            start_index=begin,
            end_index=end,
            numel_unpadded=unpadded,
            bucket_id=bucket_id,
            **none_extra,
        )
        own, goes = gradients[bucket_id], index in kept
        bucket.param_data = storages[bucket_id]
        bucket.grad_data = torch.zeros(end - begin, dtype=own.dtype, device=device) if goes else own
        for parameter in members[index]:
            first, last, _ = index_map[parameter]
            vars(parameter)["main_grad"] = bucket.grad_data[first - begin : last - begin].view(parameter.shape)
        if goes:  # freed at once, so that only one of them has bytes at a time
            place = buffer.data_parallel_group.rank() * own.numel(), instances_of(buffer.ddp_config)
            vars(bucket)["gradient"] = Gradient(index, bucket.grad_data, own, *place)
        buffer.buckets.append(bucket)
    buffer.grad_data = resting


def _move_parameters(
    buffer, members: dict[int, list[torch.nn.Parameter]], ranges, device, late: LateModel | None, instances
) -> list[torch.Tensor]:
    """Move the parameters of every group into a new storage, after which the old one is free. Raises InputError if a
    shard's memory cannot be page-locked, but only after all groups were moved, because other ranks wait for that."""
    storages, refused = [], None
    for (index, parameters), (begin, end, _) in zip(members.items(), ranges):
        storages.append(torch.zeros(end - begin, dtype=buffer.param_dtype, device=device))
        for parameter in parameters:
            first, last, _ = buffer.param_index_map[parameter]
            with torch.no_grad():
                view = storages[-1][first - begin : last - begin].view(parameter.shape)
                view.copy_(parameter.data if late is None else late.parked.take(parameter))
                parameter.data = view
        try:
            if late is not None:
                late.hold(index, storages[-1], buffer.data_parallel_group, instances)
        except InputError as error:
            refused = refused or error
            storages[-1].untyped_storage().resize_(0)
    if refused is not None:
        raise refused
    if buffer.param_data is not None:  # local variables of DistributedDataParallel.__init__ still hold views of it
        buffer.param_data.untyped_storage().resize_(0)
    buffer.param_data = None  # every bucket gets a parameter storage of its own
    return storages


def resting_gradients(buffer, ranges, kept: list, device) -> list[torch.Tensor]:
    """For every bucket, the whole gradient if it stays, or the shard of a gradient that comes and goes.

    Sets ``buffer.grad_data`` to the gradients that rest on the device.

    Args:
        kept: where the shards of gradients that come and go are; None for gradients that stay whole.
    """
    dp, dtype = buffer.data_parallel_world_size, buffer.grad_dtype
    sizes = [end - begin if keeps is None else (end - begin) // dp for (begin, end, _), keeps in zip(ranges, kept)]
    starts, numel = [], 0
    for size, keeps in zip(sizes, kept):
        if keeps != "host":  # see [Note: Where gradients begin]
            numel += ((0 if keeps is None else buffer.data_parallel_group.rank() * size) - numel) % READ_AT_ONCE
        starts.append(numel)
        numel += 0 if keeps == "host" else size
    buffer.grad_data = torch.zeros(numel, dtype=dtype, device=device)
    found = []
    for size, start, keeps in zip(sizes, starts, kept):
        own = buffer.grad_data[start : start + size]
        if keeps == "host":
            own = device_of(buffer.grad_data).host_tensor(size, dtype)
            if type(buffer) is not _BufferWithHostShards:
                buffer.__class__, buffer.host_shards = _BufferWithHostShards, []
            buffer.host_shards.append(own)
        found.append(own)
    return found


class _BufferWithHostShards(upstream._ParamAndGradBuffer):
    """A buffer in which some gradients are added up in host memory."""

    host_shards: list[torch.Tensor]

    def reset(self):
        super().reset()
        for shard in self.host_shards:
            shard.zero_()

    def scale_gradients(self, scaling_factor) -> None:
        super().scale_gradients(scaling_factor)
        if torch.is_tensor(scaling_factor) and scaling_factor.device.type == "cuda":  # --calculate-per-token-loss
            # A kernel rounds a factor on the device to the gradient's 16-bit dtype; the CPU would not.
            scaling_factor = scaling_factor.to(self.grad_dtype)
        for shard in self.host_shards:
            shard.mul_(float(scaling_factor))
