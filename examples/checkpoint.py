"""Checkpoints of the example: one file a rank for the model, Megatron's own state for the
optimizer. Written to temporary names and renamed, so that the last complete one always loads.
"""

import os
import random
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.formats.errors import InputError

LATEST = "latest_checkpointed_iteration.txt"


def save(directory, iteration: int, model, optimizer) -> None:
    """Write iteration ``iteration``; all ranks call it, with parameters whole."""
    folder = Path(directory) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "iteration": iteration,
        "model": [chunk.module.state_dict() for chunk in model],
        "optimizer": _optimizer_state(optimizer),
        "rng": (random.getstate(), numpy.random.get_state(), torch.get_rng_state()),
        # Dropout draws from these: the device's own state, and Megatron's, one a kind of region.
        "cuda_rng": (torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()),
    }
    path = folder / f"rank_{dist.get_rank():05d}.pt"
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=path, field="--save") from None
    finally:
        temporary.unlink(missing_ok=True)
    dist.barrier()
    if dist.get_rank() == 0:
        marker = Path(directory) / f".{LATEST}"
        marker.write_text(f"{iteration}\n")
        os.replace(marker, Path(directory) / LATEST)
    dist.barrier()


def load(directory, model, optimizer) -> int:
    """Read the latest checkpoint and return its iteration.

    Raises:
        InputError: there is none, or it is of another run's shape.
    """
    latest = Path(directory) / LATEST
    try:
        iteration = int(latest.read_text())
    except (OSError, ValueError):
        raise InputError("there is no checkpoint", file=latest, field="--load") from None
    path = Path(directory) / f"iter_{iteration:07d}" / f"rank_{dist.get_rank():05d}.pt"
    try:
        state = torch.load(path, weights_only=False)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path, field="--load") from None
    try:
        # The optimizer first: Megatron's host optimizer makes its states by a step, which changes parameters.
        _load_optimizer(optimizer, state["optimizer"])
        for chunk, saved in zip(model, state["model"], strict=True):
            chunk.module.load_state_dict(saved)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"was saved by a run of another shape: {str(error).splitlines()[0]}", file=path, field="--load"
        ) from None
    python_state, numpy_state, torch_state = state["rng"]
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    device_state, tracked = state["cuda_rng"]
    torch.cuda.set_rng_state(device_state)
    get_cuda_rng_tracker().set_states(tracked)
    return iteration


def _optimizers(optimizer) -> list:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _optimizer_state(optimizer) -> list:
    """Megatron's optimizer state: step counts, scaler, and this rank's shards."""
    states = []
    for one in _optimizers(optimizer):
        shards, stepped = {}, len(one.optimizer.state) > 0
        for buffer, ranges in enumerate(one.gbuf_ranges):
            for dtype, buckets in ranges.items():
                for bucket, bucket_ranges in enumerate(buckets):
                    for number, parameter in enumerate(bucket_ranges["param_map"]):
                        tensors = (
                            one._get_main_param_and_optimizer_states(parameter)
                            if stepped
                            else {"param": _main_param(one, parameter)}
                        )
                        shards[(buffer, str(dtype), bucket, number)] = {
                            name: tensor.detach().clone() for name, tensor in tensors.items()
                        }
        # Before the first update (with fp16, steps are skipped at first) Megatron has no state to give.
        common = (
            one.state_dict() if stepped else {"grad_scaler": one.grad_scaler.state_dict() if one.grad_scaler else None}
        )
        states.append({"common": common, "shards": shards})
    return states


def _main_param(optimizer, parameter) -> torch.Tensor:
    group, order = optimizer.model_param_group_index_map[parameter]
    return optimizer.optimizer.param_groups[group]["params"][order]


@torch.no_grad()
def _load_optimizer(optimizer, states: list) -> None:
    for one, state in zip(_optimizers(optimizer), states, strict=True):
        stepped = "optimizer" in state["common"]
        if stepped:
            one.load_state_dict(state["common"])
            for own in one.optimizer.state.values():
                # Megatron gives all parameters the same tensor, which each of them then counts up.
                if torch.is_tensor(own.get("step")):
                    own["step"] = own["step"].clone()
        elif one.grad_scaler:
            one.grad_scaler.load_state_dict(state["common"]["grad_scaler"])
        for buffer, ranges in enumerate(one.gbuf_ranges):
            for dtype, buckets in ranges.items():
                for bucket, bucket_ranges in enumerate(buckets):
                    for number, parameter in enumerate(bucket_ranges["param_map"]):
                        tensors = state["shards"][(buffer, str(dtype), bucket, number)]
                        if stepped:
                            one._set_main_param_and_optimizer_states(parameter, tensors)
                        else:
                            _main_param(one, parameter).copy_(tensors["param"])
        if stepped and hasattr(one.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            one.optimizer._sync_hdo_state_to_sub_optimizers()  # as Megatron does after it has loaded states
