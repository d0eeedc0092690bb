"""The optimizer's part of a workload, from options that were parsed here or by Megatron."""

from megatron_ext.formats.errors import option_error
from megatron_ext.workload.optimizer_settings import OptimizerSettings


def optimizer_settings(args) -> OptimizerSettings:
    """Dtypes and place of gradients and optimizer states for parsed options. The optimizer is Adam: refusals.py refuses
    any other.

    Args:
        args: the example's or ``describe``'s options, or Megatron's validated arguments.

    Raises:
        InputError: the host optimizer is asked for with float32 parameters, which it cannot step (torch: "can't
            optimize a non-leaf Tensor"); only a part of the states is on the host; or updates that are made on the
            device are to be delayed.
    """
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    # Megatron's own arguments and `describe` have the option; the example accumulates in fp32.
    in_fp32 = getattr(args, "accumulate_allreduce_grads_in_fp32", True)
    on_host = bool(getattr(args, "optimizer_cpu_offload", False))
    if half is None and on_host:
        why = "Megatron's host optimizer cannot step float32 parameters; train with --bf16 or --fp16"
        raise option_error("optimizer_cpu_offload", why)
    fraction = getattr(args, "optimizer_offload_fraction", 1.0)
    if on_host and str(fraction) not in ("1", "1.0"):
        why = (
            "a part of the states on the host is not supported; give 1.0, or leave --optimizer-cpu-offload out (a "
            "schedule may keep states of chosen groups on the device: states_rest)"
        )
        raise option_error("optimizer_offload_fraction", why, fraction)
    delay = getattr(args, "delayed_parameter_update", None)
    refuse_delay_on_device(delay, on_host)
    main = _dtype(getattr(args, "main_params_dtype", None))
    # Transformer Engine's Adam (2.1 or newer) then keeps the 16 bits that the bfloat16 parameter lacks.
    remainders = getattr(args, "use_precision_aware_optimizer", False) and half == "bfloat16" and not on_host
    if remainders and main == "float32" and getattr(args, "fp8_recipe", None) in (None, "delayed"):
        main = "int16"
    return OptimizerSettings(
        gradient_dtype="float32" if half is None or in_fp32 else half,
        main_parameter_dtype=main,
        moment_dtypes=tuple(_dtype(getattr(args, name, None)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")),
        on_host=on_host,
        delayed=delay is not None,
    )


def refuse_delay_on_device(delay: int | None, on_host: bool) -> None:
    """Refuse ``--delayed-parameter-update`` if the optimizer steps on the device. Raises InputError."""
    if not on_host and delay is not None:
        why = "needs an optimizer that steps on the host: --optimizer-cpu-offload"
        raise option_error("delayed_parameter_update", why, delay)


def offload_options() -> dict:
    """Arguments of Megatron's OptimizerConfig with which Adam's states and its step are on the host."""
    from megatron.core import utils
    from packaging.version import Version

    # OptimizerConfig compares the version of Transformer Engine even if it is not installed.
    if utils.get_te_version() is None:
        setattr(utils, "_te_version", Version("0"))  # noqa: B010
    return dict(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0, use_precision_aware_optimizer=True)


def _dtype(value) -> str:
    """torch's name of a dtype, which is given as a torch dtype or as the short name in Megatron's options."""
    name = str(value or "fp32").removeprefix("torch.")
    return {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}.get(name, name)
