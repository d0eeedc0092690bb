"""The workload of a run as far as its options say it: sizes and limits, not yet parameters."""

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.gpt_arguments import parallel_of
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.workload.launcher_ranks import ranks_on_this_node
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import SCHEMA_VERSION, Experts, Workload


def workload_of_run(args) -> Workload:
    """A workload without chunks for Megatron's (or the example's) options.

    Raises:
        InputError: the number of micro-batches changes during the run.
    """
    parallel = parallel_of(args) if hasattr(args, "num_microbatches") else parallel_of_megatron(args)
    return Workload(
        schema_version=SCHEMA_VERSION,
        kind="workload",
        parallel=parallel,
        zero_stage=1,
        chunks=(),
        optimizer=optimizer_settings(args),
    )


def experts_of(args) -> Experts | None:
    """How tokens go to experts, from Megatron's own validated arguments; None where the model has none."""
    if not getattr(args, "num_experts", None):
        return None
    return Experts(num_experts=args.num_experts, router_topk=args.moe_router_topk)


def parallel_of_megatron(args) -> Parallel:
    """Parallel sizes from Megatron's own validated arguments. Context-parallel ranks hold the same parameters, and
    Megatron shards over them as over replicas: they count as such.

    Raises:
        InputError: the number of micro-batches changes during the run, or this release orders them otherwise.
    """
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(args, name, None):
            field = "--" + name.replace("_", "-")
            raise InputError("a schedule holds for one number of micro-batches", field=field, value=getattr(args, name))
    pp, vp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    # With --decrease-batch-size-if-needed a rest is left out, in every iteration alike.
    num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    # core_v0.9.0 has no such option: its groups have PP micro-batches, and with no more than these in an
    # iteration it runs all forwards before the first backward.
    group = getattr(args, "microbatch_group_size_per_vp_stage", None) if vp else None
    if vp and not hasattr(args, "microbatch_group_size_per_vp_stage") and num_microbatches == pp:
        raise InputError(
            "this Megatron then runs all forwards before the first backward, which no schedule of ours knows",
            field="num_microbatches",
            value=num_microbatches,
        )
    return Parallel.of(
        pp=pp,
        vp=vp,
        dp=args.data_parallel_size * getattr(args, "context_parallel_size", 1),
        tp=args.tensor_model_parallel_size,
        microbatches=num_microbatches,
        group=group,
        gpus_per_node=ranks_on_this_node(),
        order="interleaved" if vp else None,
        ep=getattr(args, "expert_model_parallel_size", 1),
        etp=getattr(args, "expert_tensor_parallel_size", None),
    )
