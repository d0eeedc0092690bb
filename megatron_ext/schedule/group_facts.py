"""Facts that follow from a group together with the workload: its parameters and layers, its largest pieces, and where
it can rest and be stepped. A schedule file does not hold them."""

from collections.abc import Iterable, Sequence

from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.optimizer_settings import HALF, OptimizerSettings
from megatron_ext.workload.state_layout import LINE_BYTES, region_bytes, tensor_bytes
from megatron_ext.workload.workload import Members, Parameter, Workload, group_bytes, group_ranks


def make_group(
    workload: Workload, pp_rank: int, model_chunk_id: int, parameters: Sequence[Parameter], algorithm=None, **rests
) -> Group:
    """A group of ``parameters`` (execution order, one dtype) with Megatron's padding.

    ``algorithm(pp_rank, bytes, ranks)`` returns the algorithm of its route ``gpu``; without it, one all-gather.
    ``rests``: further fields of the group.
    """
    size, ranks = group_bytes(parameters, workload.parallel), group_ranks(parameters, workload.parallel)
    return Group(
        pp_rank=pp_rank,
        model_chunk_id=model_chunk_id,
        parameters=tuple(p.name for p in parameters),
        bytes=size,
        ranks=ranks,
        algorithm=algorithm(pp_rank, size, ranks) if algorithm else None,
        **rests,
    )


def members_of(group: Group, workload: Workload) -> Members:
    """The parameters of a group; they have one dtype."""
    return workload.chunk(group.pp_rank, group.model_chunk_id).members(group.parameters)


def uses_of_groups(groups: Iterable[Group], workload: Workload) -> list[tuple[int, int]]:
    """For each group, the first and the last layer of its chunk that use it."""
    return [members_of(group, workload).uses for group in groups]


def gradient_bytes(group: Group, workload: Workload) -> int:
    """Bytes of the whole gradient of ``group``, with Megatron's padding."""
    return group.bytes // ITEM_BYTES[members_of(group, workload).dtype] * workload.optimizer.gradient_item_bytes


def shard_numel(group: Group, workload: Workload) -> int:
    """Elements of one shard of a group, with Megatron's padding."""
    return group.bytes // ITEM_BYTES[members_of(group, workload).dtype] // group.ranks


def _largest_part(group: Group, workload: Workload) -> int:
    """The most elements that one shard of ``group`` has of one parameter."""
    return min(max(members_of(group, workload).numels), shard_numel(group, workload))


def largest_gradient(group: Group, workload: Workload) -> int:
    """The most bytes that one parameter of ``group`` takes in a slot: its part in one shard, in fp32."""
    return tensor_bytes(_largest_part(group, workload))


def largest_region(group: Group, workload: Workload) -> int:
    """The most bytes that one parameter of ``group`` and its moments take in a slot: its part in one shard, in fp32."""
    return region_bytes(_largest_part(group, workload), len(workload.optimizer.moment_dtypes))


def steps_on_host_shards(settings: OptimizerSettings, dtype: str) -> bool:
    """Whether the optimizer can update a shard of ``dtype`` in host memory.

    It updates 16-bit parameters through copies of its own and writes them into the shard, wherever the shard is. It
    updates other parameters in place, so their shard has to be where it steps; also 16-bit ones of which it keeps only
    the bits that they lack.
    """
    return settings.on_host or (dtype in HALF and settings.main_parameter_dtype != "int16")


def can_rest_on_host(workload: Workload) -> bool:
    """Whether every shard of the workload can rest in host memory."""
    dtypes = {p.dtype for chunk in workload.chunks for p in chunk.parameters}
    return all(steps_on_host_shards(workload.optimizer, dtype) for dtype in dtypes)


def can_step_early(group: Group, workload: Workload) -> bool:
    """Whether the host's optimizer can step the group during the backward: no gradients of other ranks are added to the
    group's gradient after its reduce, and its states are not on the device.

    With tensor parallelism, every vector is assumed to be a parameter that all tensor-parallel ranks hold alike.
    """
    if group.states_rest == "device":
        return False
    alike = workload.parallel.tensor_model_parallel_size > 1
    return not any(p.shared_embedding or (alike and len(p.shape) < 2) for p in members_of(group, workload).parameters)


def saved_bytes(group: Group, workload: Workload) -> int:
    """The most bytes that one rank takes to keep the group's states from before a step during the backward: float32
    parameters, moments and the step of each parameter. For states on the drive it is 0: the drive keeps the old states.
    """
    if group.states_rest == "nvme":
        return 0
    count, tensors = len(group.parameters), 1 + len(workload.optimizer.moment_dtypes)
    return tensors * tensor_bytes(shard_numel(group, workload)) + count * (tensors + 1) * LINE_BYTES
