"""Checkpoints whose experts were spread over other ranks."""

import contextlib
import sys
from pathlib import Path

from megatron.core import dist_checkpointing

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.buckets import is_expert

LATEST = "latest_checkpointed_iteration.txt"
SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def refuse_other_experts(optimizer) -> None:
    """Refuse a checkpoint whose experts were spread otherwise, where its format cannot spread their states anew.

    Megatron compares tensor and pipeline parallelism alone, and then fails at shapes of tensors.

    Args:
        optimizer: Megatron's DistributedOptimizer. One that has no experts is not asked about.

    Raises:
        InputError: naming the option, and the first group of experts.
    """
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    folder = getattr(args, "load", None)
    if folder is None or not any(is_expert(p) for buffer in optimizer.buffers for p in buffer.params):
        return
    saved = None
    with contextlib.suppress(OSError, ValueError):  # Megatron says what is wrong with it
        iteration = getattr(args, "ckpt_step", None) or (Path(folder) / LATEST).read_text()
        folder = Path(folder) / f"iter_{int(iteration):07d}"
        saved = dist_checkpointing.load_common_state_dict(str(folder)).get("args")
    for name in SIZES:
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if theirs not in (None, ours):
            group = min(vars(bucket)["group"] for buffer in optimizer.buffers for bucket in buffer.buckets)
            raise InputError(
                f"{folder} was saved with {theirs}, and its format cannot spread the optimizer's states of experts "
                f"(groups[{group}] and others) anew; load it with {theirs} once and save it with "
                "--dist-ckpt-optim-fully-reshardable, or add --no-load-optim",
                field="--" + name.replace("_", "-"),
                value=ours,
            )
