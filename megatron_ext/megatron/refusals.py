"""Checks before a scheduled run of a patched Megatron: every hook is there, and no option is in the way."""

from importlib.util import find_spec
from pathlib import Path

from megatron_ext.cost import environment
from megatron_ext.cost.cost_table import Metadata
from megatron_ext.formats.errors import InputError, flag, option_error
from megatron_ext.megatron.releases import ramps_up
from megatron_ext.schedule import memory_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload import whole_gradients

_OWN_SHARDS = "shards and gathers parameters in its own way"
_SCALED = "gathers values with scales that Transformer Engine keeps apart; groups and host copies have no scales"
_GRAPH = "a replayed graph does not run the forward of its layers, where a schedule waits for parameters"
_AFTER_REDUCE = "Megatron adds these gradients after --overlap-grad-reduce has sent the others"
_STATES = "copies optimizer states to host memory itself; a plan can place them there"
_GROUPED = "keeps weights of several experts in a tensor of Transformer Engine's own, whose bytes groups do not move"
_SAVER = "lets torch_memory_saver release Megatron's buffers, but groups have their own storage"
_ACTIVATIONS = "its copies of activations use the same link as host copies, and no bill or simulation counts them"

REASONS = {
    "optimizer": "Megatron shards only the states of adam",
    "use_megatron_fsdp": _OWN_SHARDS,
    "use_custom_fsdp": _OWN_SHARDS,
    "use_torch_fsdp2": _OWN_SHARDS,
    "nccl_ub": "registers Megatron's buffers with NCCL, but groups have their own storage",
    "fp8_param_gather": _SCALED,
    "fp4_param_gather": _SCALED,
    "reuse_grad_buf_for_mxfp8_param_ag": "gathers parameters into the memory of the gradients",
    "use_layer_wise_distributed_optimizer": "each rank owns complete layers instead of shards",
    "overlap_moe_expert_parallel_comm": "alternates layers of two micro-batches, which no order of steps has",
    "use_tp_pp_dp_mapping": "numbers ranks in another way",
    "hybrid_context_parallel": "divides sequences differently for each micro-batch",
    "dynamic_context_parallel": "divides sequences differently for each micro-batch",
    "sequence_packing_scheduler": "gives each iteration another number of micro-batches",
    "inprocess_restart": "restarts training in the same process; use torchrun --max-restarts, which starts new ones",
    "ddp_reduce_scatter_with_fp32_accumulation": "holds a second copy of gradients, which no bill counts",
    "ddp_param_name_patterns_for_fp32_local_accumulation": "adds some parameters' gradients in separate buffers",
    "defer_embedding_wgrad_compute": _AFTER_REDUCE,
    "overlap_dispatch_backward_with_experts_wgrad": _AFTER_REDUCE,
    "cuda_graph_impl": _GRAPH,
    "enable_cuda_graph": _GRAPH,
    "external_cuda_graph": _GRAPH,
    "optimizer_cuda_graph": "a replayed step does not call the hook that reports changed parameters",
    "cpu_offloading_num_layers": _ACTIVATIONS,
    "fine_grained_activation_offloading": _ACTIVATIONS,
    "chunked_optimizer_state_offload": _STATES,
    "offload_optimizer_states": _STATES,
    "disable_grad_buffers_cpu_backup": _SAVER,
    "disable_param_buffers_cpu_backup": _SAVER,
    "moe_single_grouped_weight": _GROUPED,
    "moe_single_grouped_bias": _GROUPED,
    "moe_use_upcycling": "also builds a dense model; convert it to a model with experts in a run without a schedule",
    "perform_rl_step": "reads and offloads parameters between training steps",
    "qk_clip": "changes whole parameters outside the optimizer",
    "freeze_all_layers": "trains nothing, and turns --use-distributed-optimizer off",
}
"""Options that change what owns a parameter's storage, what gathers it, or the order of steps, and why each cannot be
combined with a schedule. Some have different names in different releases; options that a release lacks are skipped."""

NEUTRAL = dict.fromkeys(REASONS, False) | {
    "ddp_param_name_patterns_for_fp32_local_accumulation": [],
    "cuda_graph_impl": "none",
    "cpu_offloading_num_layers": 0,
    "optimizer": "adam",
}
"""The values of these options that change none of this."""

SHARDED_WEIGHTS = {
    "gtp_weight_remat_size": "tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size": "expert_tensor_parallel_num_weight_shards",
}
"""The number of ranks, besides tensor-parallel ranks, that share a weight, and the option from which it follows; this
option counts both."""

REASONS |= {"cuda_graph_scope": _GRAPH} | dict.fromkeys(
    SHARDED_WEIGHTS.values(), "shards weights over tensor-parallel ranks, and gathers them itself"
)

OF_DDP = (
    "use_megatron_fsdp nccl_ub fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag "
    "ddp_reduce_scatter_with_fp32_accumulation"
).split()
"""Options that are passed to DistributedDataParallel, and may be set without a command line."""

NOT_COMBINED = "cannot be combined with --user-defined-schedule:"


def refuse_unsupported(args) -> None:
    """Refuse options under which the schedule would not control how parameters are gathered.

    Raises:
        InputError: naming the first such option and its value.
    """
    refuse_combinations(args)
    # With overlap_param_gather Megatron asks for whole parameters before it evaluates, saves and hashes. Every release
    # has this option.
    for name, absent in (("use_distributed_optimizer", False), ("overlap_param_gather", True)):
        if not getattr(args, name, absent):
            raise option_error(name, "--user-defined-schedule needs it", False)


def replaced_options(args) -> list[str]:
    """Lines about options that the schedule replaces, and about one that this Megatron ignores."""
    lines = []
    if getattr(args, "overlap_param_gather_with_optimizer_step", False):
        option = "--overlap-param-gather-with-optimizer-step"
        lines.append(f"{option}: ignored, because the schedule says when gathers begin")
    if getattr(args, "rampup_batch_size", None) and not ramps_up():
        lines.append("--rampup-batch-size: this release of Megatron ignores it; use --step-batch-size-schedule")
    return lines


def warnings_at_start(args, schedule: Schedule) -> list[str]:
    """Lines about options that are accepted and cost memory or time under a schedule."""
    lines = []
    if schedule.zero_stage == 3 and getattr(args, "fp8", None):
        lines.append(
            f"--fp8-format {args.fp8}: Transformer Engine keeps fp8 copies of weights between micro-batches (one byte "
            "per parameter, two if it also keeps the transpose); a reshard does not free them and no limit counts them"
        )
    if getattr(args, "check_for_nan_in_loss_and_grad", False):
        lines.append(
            "--no-check-for-nan-in-loss-and-grad is not given: on a GPU Megatron waits for the device once per bucket, "
            f"and this schedule has {len(schedule.groups)}"
        )
    if memory_bill.never_whole(schedule):
        lines.append(
            "all parameters whole exceed limits.device_bytes: evaluation, checkpoints and other reads between two "
            "iterations bring one group after the other, and an evaluation does so for every micro-batch"
        )
    return lines


def refuse_checkpoints(args, schedule: Schedule) -> None:
    """Refuse checkpoints that cannot be written: the format needs all parameters of a rank whole, which they never are;
    a forked process sees neither the drive as it was nor page-locked memory; a process that is not forked shares host
    memory with training; or a package is missing, without which Megatron's writer waits for ever.

    Raises:
        InputError: naming the option.
    """
    if getattr(args, "save", None) is None:
        return
    short, slots = memory_bill.never_whole(schedule), schedule.step_slots
    whole = f"needs all parameters whole, {short} bytes more than limits.device_bytes allows; torch_dist does not"
    unseen = "the writing process cannot read the page-locked parameters that the device casts; leave it out"
    late = "would write states that the next step has already changed; leave it out, or keep optimizer states in memory"
    shared = "its process reads optimizer states in host memory while training changes them; leave it out"
    reads_states = getattr(args, "async_save", False) and getattr(args, "optimizer_cpu_offload", False)
    missing = "needs the Python package psutil, which is not installed: pip install psutil"
    for option, value, wrong, why in (
        ("ckpt_format", "torch", short, whole),
        ("non_persistent_ckpt_type", "local", short, whole),
        ("async_save", True, schedule.state_slots, late),
        ("async_save", True, slots is not None and slots.cast == "device", unseen),
        ("use_persistent_ckpt_worker", True, reads_states, shared),
        ("ckpt_format", "torch_dist", find_spec("psutil") is None, missing),
    ):
        if wrong and getattr(args, option, None) == value:
            raise option_error(option, why, value)


def refuse_with_gradients(args, config, on_host: bool) -> None:
    """Refuse options that cannot be combined with a schedule in which gradients come and go.

    Args:
        args: Megatron's arguments.
        config: Megatron's TransformerConfig.
        on_host: some gradients are added up in host memory.

    Raises:
        InputError: naming the option.
    """
    options = {**vars(args), **vars(config)}
    for name in whole_gradients.options_with_whole_gradients(options):
        raise option_error(name, f"{whole_gradients.REASON}; keep `gradients` whole", options[name])
    if on_host and options.get("fp16") and options.get("optimizer_cpu_offload"):
        raise option_error("fp16", "gradients in host memory would not be unscaled; keep `gradients` whole", True)


def refuse_without_stream_flags(schedule: Schedule, why_no_flags: str, delayed: bool, *, file) -> None:
    """Refuse copies between host memory and a device whose streams cannot store flags: threads would have to call the
    driver, which leads to a deadlock.

    Args:
        why_no_flags: the text of :attr:`Device.why_no_flags`.

    Raises:
        InputError: naming what is missing, and the schedule's field that needs it.
    """
    needs = {
        "publish": bool(schedule.publish),
        "groups[].gradients": any(group.gradients == "host" for group in schedule.groups),
        "step_slots": schedule.step_slots is not None,
        "state_slots": schedule.state_slots is not None,
        "rollback_bytes": schedule.rollback_bytes is not None,
        "--delayed-parameter-update": delayed,
    }
    field = next((name for name, needed in needs.items() if needed), None)
    if field is not None and why_no_flags:
        raise InputError(f"needs streams that wait for flags in host memory: {why_no_flags}", file=file, field=field)


def refuse_host_shards_of_aware_optimizer(schedule: Schedule, args, *, file) -> None:
    """Refuse shards in host memory if a precision-aware optimizer on the device writes them itself, because its kernels
    would then step on host memory.

    Raises:
        InputError: naming the first such group.
    """
    aware = getattr(args, "use_precision_aware_optimizer", False) and not getattr(args, "optimizer_cpu_offload", False)
    found = next((index for index, group in enumerate(schedule.groups) if group.shard_rests == "host"), None)
    if aware and found is not None:
        why = "--use-precision-aware-optimizer steps on the shard itself; leave it out, or add --optimizer-cpu-offload"
        raise InputError(why, file=file, field=f"groups[{found}].shard_rests", value="host")


def refuse_combinations(args) -> None:
    """The part of :func:`refuse_unsupported` that needs only the options as they were given.

    Raises:
        InputError: naming the first such option and its value.
    """

    # Megatron uses None or an empty list for "not given".
    found = [name for name, neutral in NEUTRAL.items() if getattr(args, name, neutral) not in (neutral, None, [])]
    found += [option for name, option in SHARDED_WEIGHTS.items() if getattr(args, name, 1) not in (1, None)]
    if "full_iteration" in str(getattr(args, "cuda_graph_scope", "")).lower():
        found.append("cuda_graph_scope")
    if found:
        raise option_error(found[0], f"{NOT_COMBINED} {REASONS[found[0]]}", getattr(args, found[0], None))


def environment_mismatch(schedule: Schedule, path) -> list[str]:
    """One line if the schedule was planned from costs of other hardware or software than this machine's: it trains the
    same, but its prediction may not hold. No line if they agree or the schedule does not say."""
    measured_on = schedule.metadata.options.measured_on
    if measured_on is None:
        return []
    metadata = Metadata(hardware=measured_on.hardware, software=measured_on.software)
    from megatron_ext.runtime import machine  # imports torch, which is not needed to read options

    here = {part: facts for part, facts in machine.environment().items() if getattr(metadata, part) is not None}
    found = environment.environment_differences(metadata, here)
    said = f"{path}: planned from costs of another environment ({'; '.join(found)}): its prediction may not hold here"
    return [said] if found else []


def require_hooks(root: Path) -> None:
    """Refuse a tree in which a hook is not in its place.

    Raises:
        InputError: naming the file and the hook.
    """
    from megatron_ext import checkout  # slow to import, and not needed to read options

    problems = checkout.verify_hooks(root)
    if problems:
        raise InputError(f"{problems[0]}; run `megatron-ext patch check {root}`", file=root)


def schedule_without_hooks() -> str | None:
    """One line if Megatron runs a pipeline schedule without hooks, as some forks can; otherwise None."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_ext.checkout.hook_table import SCHEDULE_FUNCTIONS

    chosen = schedules.get_forward_backward_func()
    if chosen.__module__ == schedules.__name__ and chosen.__name__ in SCHEDULE_FUNCTIONS:
        return None
    return (
        f"get_forward_backward_func chose {chosen.__module__}.{chosen.__qualname__}, which has no hooks: "
        "a schedule cannot be followed there; turn off the option that chooses it"
    )


def megatron_root() -> Path:
    """The root of the Megatron tree that this process has imported."""
    import megatron.core

    return Path(megatron.core.__file__).resolve().parents[2]


def refuse_model(model) -> None:
    """Refuse models whose layers do not all lie in one ``decoder``: actions can be placed only between these. And
    refuse parameters without gradient: they are in no bucket, so no schedule moves them and no bill counts them. If a
    layer has no others, its input may have no gradient to which actions of a backward could be attached.

    Args:
        model: a torch module, without wrappers.

    Raises:
        InputError: naming the model's class and what is missing for it, or the first parameter without gradient.
    """
    has = {name for name, _ in model.named_children()}
    layers = {name.partition(".layers.")[0] for name, _ in model.named_parameters() if ".layers." in name}
    why = ""
    if has & {"vision_model", "language_model", "vision_projection"}:
        why = "a vision model and a language model: steps, bills and bounds are not known for the vision model"
    elif "encoder" in layers and ("decoder" in layers or "decoder" in has):
        why = "an encoder next to its decoder: messages between stages carry two tensors, which is not supported"
    elif layers and not layers <= {"decoder", "mtp"}:
        why = f"its layers in {', '.join(sorted(layers))}: actions can only be placed between layers of one decoder"
    if why:
        raise InputError(f"has {why}", field=type(model).__name__)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise InputError("takes no gradient: frozen parameters cannot be scheduled", field=name)


def refuse_ddp_config(config) -> None:
    """Refuse features of DistributedDataParallel that change what a bucket is or what gathers it.

    Raises:
        InputError: naming the option and its value.
    """
    for name in OF_DDP:
        value = getattr(config, name.removeprefix("ddp_"), NEUTRAL[name])
        if value != NEUTRAL[name]:
            raise option_error(name, f"{NOT_COMBINED} {REASONS[name]}", value)
    # With overlap_param_gather Megatron asks for whole parameters before it evaluates, saves and hashes.
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        if not getattr(config, name):
            raise option_error(name, f"--user-defined-schedule needs {flag(name)}", False)
