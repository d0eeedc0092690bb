"""Checkpoints whose experts were spread over other ranks, or whose optimizer states lie in buckets of other groups."""

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
"""What is said of a checkpoint of format torch."""

GROUPS = "user_defined_schedule_groups"
"""The argument of a run, saved with the others, that tells its groups from other ones."""


def refuse_other_experts(group: int) -> None:
    """Refuse to load a checkpoint whose experts were spread otherwise, where its format cannot spread them anew.

    Megatron compares tensor and pipeline parallelism alone, and then fails at missing files or shapes of tensors, each
    rank in other words.

    Args:
        group: the first group of experts.

    Raises:
        InputError: naming the option and the group; on all ranks that see the checkpoint.
    """
    args = arguments.of_run()
    saved, how = _loaded(args)
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if theirs not in (None, ours):
            why = f"{args.load} was saved with {theirs} and cannot spread experts (groups[{group}] and others) anew"
            raise option_error(name, f"{why}; load it with {theirs}, {how}", ours)


def refuse_other_groups(groups: Iterable[Group], in_order: bool) -> None:
    """Refuse to load optimizer states that lie in buckets of other groups than ``groups``, which are all of the
    schedule: where buckets are equally large, Megatron would take the states of one parameter for those of another.

    Args:
        in_order: the groups of this chunk hold parameters that follow each other, as Megatron's buckets do. Then a
            checkpoint of format torch, which keeps a whole buffer, is loaded if it does not say of which groups it is.

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
    """Refuse to convert a checkpoint while the model is built late: Megatron writes it before training begins, when one
    group has bytes, and the file would hold no parameters.

    Raises:
        InputError: naming the option.
    """
    if (form := getattr(arguments.of_run(), "ckpt_convert_format", None)) is not None:
        raise option_error("ckpt_convert_format", "parameters never fit whole; set MEGATRON_EXT_STOCK_GATHER=1", form)


def _loaded(args) -> tuple[Any, str]:
    """As :func:`_saved`; None for the former also where nothing is loaded, or what is loaded cannot be read."""
    with contextlib.suppress(Exception):  # of formats that are Megatron's own: what is wrong with it, Megatron says
        return _saved(args)
    return None, ""


def _folder(place: Path, step: int | None = None) -> Path:
    """Of the checkpoint ``step`` in ``place``; None: of the latest; one that is not there, before
    all others, where there is none or it is a release, which has no iteration."""
    latest = place / LATEST
    text = latest.read_text().strip() if latest.exists() else ""
    return place / f"iter_{step or (int(text) if text.isdigit() else -1):07d}"


def _saved(args) -> tuple[Any, str]:
    """The arguments of the run that saved what ``args`` load, and how it could have saved for other sizes; None for
    the former where it did."""
    folders = [_folder(Path(args.load), getattr(args, "ckpt_step", None))]
    if getattr(args, "non_persistent_ckpt_type", None) == "global":  # Megatron takes it where it is as new
        apart = args.non_persistent_global_ckpt_dir or Path(args.load) / "non_persistent"
        folders.insert(0, _folder(Path(apart)))
    folder = max(folders, key=lambda one: one.name)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        file = min(folder.glob("mp_rank_*/model_optim_rng.pt"))
        # As Megatron reads it.
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=False)["args"]
        return saved, BY_TORCH
    common = dist_checkpointing.load_common_state_dict(str(folder))
    # Where the checkpoint does not say the form, it follows the option; see releases.py.
    unsaid = "fully_sharded_model_space" if getattr(common["args"], "ckpt_fully_parallel_save", False) else ""
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type", unsaid)
    if form.startswith("fully") or getattr(args, "no_load_optim", False) or getattr(args, "finetune", False):
        return None, ""
    return common["args"], "and save it once with --dist-ckpt-optim-fully-reshardable; or add --no-load-optim"
