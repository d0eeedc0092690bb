"""Refuse checkpoints whose experts were spread over other ranks, or whose optimizer states are in other buckets."""

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_ext.formats.errors import option_error
from megatron_ext.megatron import arguments
from megatron_ext.megatron.checkpoint_states import OTHER_GROUPS
from megatron_ext.schedule.user_defined_schedule import Group

LATEST = "latest_checkpointed_iteration.txt"

BY_TORCH = "and save it once with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
"""The advice for a checkpoint of format torch."""

GROUPS = "user_defined_schedule_groups"
"""The argument that identifies the groups of a run; it is saved with the run's other arguments."""


def refuse_other_experts(group: int) -> None:
    """Refuse to load a checkpoint whose experts were spread over other ranks, if its format cannot spread them again.

    Megatron compares tensor and pipeline parallelism only, and then fails because of missing files or tensor shapes,
    with a different error on each rank.

    Args:
        group: the index of the first group of experts.

    Raises:
        InputError: naming the option and the group; on all ranks that see the checkpoint.
    """
    args = arguments.of_run()
    saved, how = _loaded(args)
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if theirs not in (None, ours):
            why = f"{args.load} was saved with {theirs} and cannot reshard experts (such as groups[{group}])"
            raise option_error(name, f"{why}; load it with {theirs}, {how}", ours)


def refuse_other_groups(groups: Iterable[Group], in_order: bool) -> None:
    """Refuse to load optimizer states that lie in buckets of other groups than ``groups``, which are all groups of the
    schedule. If the buckets had the same sizes, Megatron would give the states of one parameter to another.

    Args:
        in_order: the groups of this chunk hold consecutive parameters, as Megatron's buckets do. Then a checkpoint of
            format torch, which stores a whole buffer, is loaded even if it does not say which groups it was saved with.

    Raises:
        InputError: on all ranks that see the checkpoint.
    """
    args = arguments.of_run()
    if args is None:
        return
    layout = sorted((group.pp_rank, group.model_chunk_id, group.parameters) for group in groups)
    vars(args)[GROUPS] = hashlib.sha256(repr(layout).encode()).hexdigest()
    without_states = getattr(args, "no_load_optim", False) or getattr(args, "finetune", False)
    saved, how = (None, "") if without_states else _loaded(args)
    unknown = None if in_order or how != BY_TORCH else "not said"
    if saved is not None and getattr(saved, GROUPS, unknown) not in (None, vars(args)[GROUPS]):
        raise option_error("load", OTHER_GROUPS, args.load)


def refuse_conversion() -> None:
    """Refuse to convert a checkpoint while the model is built late. Megatron writes the converted checkpoint before
    training begins, when only one group has bytes, so the file would hold no parameters.

    Raises:
        InputError: naming the option.
    """
    if (form := getattr(arguments.of_run(), "ckpt_convert_format", None)) is not None:
        raise option_error("ckpt_convert_format", "parameters never fit whole; set MEGATRON_EXT_STOCK_GATHER=1", form)


def _loaded(args) -> tuple[Any, str]:
    """As :func:`_saved`; the arguments are None also if nothing is loaded, or if the checkpoint cannot be read."""
    with contextlib.suppress(Exception):  # the formats are Megatron's own, and Megatron reports what is wrong
        return _saved(args)
    return None, ""


def _folder(place: Path, step: int | None = None) -> Path:
    """The folder of the checkpoint of iteration ``step`` in ``place``, or of the latest one if ``step`` is None. If
    there is none, or it is a release, which has no iteration, the name sorts before all others and does not exist."""
    latest = place / LATEST
    text = latest.read_text().strip() if latest.exists() else ""
    return place / f"iter_{step or (int(text) if text.isdigit() else -1):07d}"


def _saved(args) -> tuple[Any, str]:
    """The arguments of the run that saved the checkpoint which ``args`` load, and how that run can save it so that
    other sizes can load it. The arguments are None if the checkpoint can be loaded with other sizes already."""
    folders = [_folder(Path(args.load), getattr(args, "ckpt_step", None))]
    if getattr(args, "non_persistent_ckpt_type", None) == "global":  # Megatron takes it if it is as new
        folders.insert(0, _folder(Path(args.non_persistent_global_ckpt_dir or Path(args.load) / "non_persistent")))
    folder = max(folders, key=lambda one: one.name)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        file = min(folder.glob("mp_rank_*/model_optim_rng.pt"))
        # As Megatron reads it.
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False)["args"], BY_TORCH
    common = dist_checkpointing.load_common_state_dict(str(folder))
    # If the checkpoint does not say the form, the form follows from the option; see releases.py.
    unsaid = "fully_sharded_model_space" if getattr(common["args"], "ckpt_fully_parallel_save", False) else ""
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type", unsaid)
    if form.startswith("fully") or getattr(args, "no_load_optim", False) or getattr(args, "finetune", False):
        return None, ""
    return common["args"], "and save it once with --dist-ckpt-optim-fully-reshardable; or add --no-load-optim"
