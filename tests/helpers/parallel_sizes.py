"""Parallel sizes by their short names."""

from megatron_ext.workload.parallel import Order, Parallel, megatron_order


def sized(
    *,
    microbatches: int,
    pp: int = 1,
    vp: int | None = None,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    instances: int = 1,
    group: int | None = None,
    gpus_per_node: int | None = None,
    order: Order | None = None,
) -> Parallel:
    """``vp=None`` is one chunk; ``order=None`` is Megatron's order for these sizes."""
    return Parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp or 1,
        data_parallel_size=dp,
        tensor_model_parallel_size=tp,
        num_microbatches=microbatches,
        microbatch_group_size_per_vp_stage=group,
        gpus_per_node=gpus_per_node,
        order=order or megatron_order(pp, vp),
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=instances,
    )
