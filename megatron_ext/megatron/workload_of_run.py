"""The part of a run's workload that follows from its options: sizes and limits, but not parameters."""

from types import SimpleNamespace

from megatron_ext.megatron.gpt_arguments import parallel_of, parallel_sizes_of
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.megatron.releases import ramps_up
from megatron_ext.workload.batch_ramp import numbers_of_microbatches
from megatron_ext.workload.launcher_ranks import ranks_on_this_node
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import SCHEMA_VERSION, Experts, Workload


def workload_of_run(args) -> Workload:
    """A workload without chunks for Megatron's (or the example's) options. Raises InputError, as
    :func:`parallel_of_megatron` does."""
    parallel = parallel_of(args) if hasattr(args, "num_microbatches") else parallel_of_megatron(args)
    settings = optimizer_settings(args)
    return Workload(
        schema_version=SCHEMA_VERSION, kind="workload", parallel=parallel, zero_stage=1, chunks=(), optimizer=settings
    )


def experts_of(args) -> Experts | None:
    """How tokens are sent to experts, from Megatron's own validated arguments; None if the model has no experts."""
    if not getattr(args, "num_experts", None):
        return None
    return Experts(num_experts=args.num_experts, router_topk=args.moe_router_topk)


def numbers_of_run(args, consumed_samples: int = 0) -> tuple[int, ...]:
    """All numbers of micro-batches per iteration that Megatron reaches after ``consumed_samples``, the final one last.

    Raises:
        InputError: naming the option that changes the batch size.
    """
    if hasattr(args, "rampup_batch_size") and not ramps_up():
        args = SimpleNamespace(**(vars(args) | {"rampup_batch_size": None}))
    return numbers_of_microbatches(args, consumed_samples)


def parallel_of_megatron(args) -> Parallel:
    """Parallel sizes from Megatron's own validated arguments.

    Raises:
        InputError: the batch size does not divide.
    """
    vp, group = args.virtual_pipeline_model_parallel_size, args.microbatch_group_size_per_vp_stage
    return parallel_sizes_of(args, vp, numbers_of_run(args)[-1], group, ranks_on_this_node())
