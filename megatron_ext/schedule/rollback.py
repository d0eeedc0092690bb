"""Which groups the host's optimizer can step beside the backward, and the memory for their states from before."""

from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.state_layout import LINE_BYTES, tensor_bytes
from megatron_ext.workload.workload import Workload


def can_step_early(group: Group, workload: Workload) -> bool:
    """Whether no other rank's gradients are added to the group's behind its reduce, and its states are not on the
    device.

    With tensor parallelism vectors are taken for parameters that its ranks hold alike.
    """
    if group.states_rest == "device":
        return False
    chosen = set(group.parameters)
    members = [p for p in workload.chunk(group.pp_rank, group.model_chunk_id).parameters if p.name in chosen]
    alike = workload.parallel.tensor_model_parallel_size > 1
    return not any(p.shared_embedding or (alike and len(p.shape) < 2) for p in members)


def saved_bytes(group: Group, workload: Workload) -> int:
    """At most what the copies of one rank take: float32 parameters, moments and the step of each parameter. Of states
    on the drive the drive keeps what was before."""
    if group.states_rest == "nvme":
        return 0
    chosen = set(group.parameters)
    members = [p for p in workload.chunk(group.pp_rank, group.model_chunk_id).parameters if p.name in chosen]
    tensors = 1 + len(workload.optimizer.moment_dtypes)
    shard = group.bytes // ITEM_BYTES[members[0].dtype] // group.ranks
    return tensors * tensor_bytes(shard) + len(members) * (tensors + 1) * LINE_BYTES
