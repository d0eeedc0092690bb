"""Checkpoints of the example: one file a rank for the model, Megatron's own state for the optimizer.

Files are written to temporary names and renamed, so that the last complete checkpoint always loads. Beside each lies
its SHA-256. Reading a file runs no code from it (torch.load with weights_only=True): it holds tensors, numbers and
text. All ranks fail with the same line.
"""

import hashlib
import os
import random
import zipfile
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.formats import directory_lock
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.agreement import agree

LATEST = "latest_checkpointed_iteration.txt"


def claim(directory) -> None:
    """Keep other jobs from saving to ``directory`` until this process ends, and clear away what a killed one left;
    collective.

    Raises:
        InputError: on every rank, where another job saves there or the directory cannot be written.
    """
    error = None
    if dist.get_rank() == 0:
        try:
            os.makedirs(directory, exist_ok=True)
            directory_lock.hold(directory, field="--save")
            for left in Path(directory).glob("iter_*/*.tmp"):
                left.unlink()
        except InputError as refused:
            error = str(refused)
        except OSError as refused:
            error = str(InputError(f"cannot be written: {refused.strerror}", field="--save", value=str(directory)))
    _agree(error, directory)


def save(directory, iteration: int, model, optimizer) -> None:
    """Write iteration ``iteration``; all ranks call it, with parameters whole.

    Raises:
        InputError: on every rank, naming the file that could not be written.
    """
    path = _path(directory, iteration)
    numpy_name, numpy_keys, *numpy_rest = numpy.random.get_state()
    state = {
        "iteration": iteration,
        "model": [chunk.module.state_dict() for chunk in model],
        "optimizer": _optimizer_state(optimizer),
        "rng": (random.getstate(), (numpy_name, numpy_keys.tolist(), *numpy_rest), torch.get_rng_state()),
        # Dropout draws from these: the device's own state, and Megatron's, one a kind of region.
        "cuda_rng": (torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()),
    }
    error = None
    try:
        _write(path, state)
    except (OSError, RuntimeError) as failed:
        # Torch's writer may fail once more on its way out of the file's error, with an error of its own.
        cause = failed if isinstance(failed, OSError) else failed.__context__
        why = cause.strerror if isinstance(cause, OSError) else _first_line(failed)
        error = str(InputError(f"cannot be written: {why}", file=path, field="--save"))
    _agree(error, directory)
    if dist.get_rank() == 0:
        try:
            _replace(Path(directory) / LATEST, lambda file: file.write_text(f"{iteration}\n"))
        except OSError as failed:
            marker = Path(directory) / LATEST
            error = str(InputError(f"cannot be written: {failed.strerror}", file=marker, field="--save"))
    _agree(error, directory)


def load(directory, model, optimizer) -> int:
    """Read the latest checkpoint and return its iteration; collective.

    Raises:
        InputError: on every rank: there is none, a file is damaged, or it is of another run's shape.
    """
    error, state, iteration = None, {}, 0
    try:
        iteration, state = _read(directory)
    except InputError as refused:
        error = str(refused)
    _agree(error, directory)
    try:
        # The optimizer first: Megatron's host optimizer makes its states by a step, which changes parameters.
        _load_optimizer(optimizer, state["optimizer"])
        for chunk, saved in zip(model, state["model"], strict=True):
            chunk.module.load_state_dict(saved)
        _load_random_states(state)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as failed:
        why = f"was saved by a run of another shape: {_first_line(failed)}"
        error = str(InputError(why, file=_path(directory, iteration), field="--load"))
    _agree(error, directory)
    return iteration


def _first_line(failed: Exception) -> str:
    return str(failed).partition("\n")[0] or type(failed).__name__


def _path(directory, iteration: int) -> Path:
    return Path(directory) / f"iter_{iteration:07d}" / f"rank_{dist.get_rank():05d}.pt"


def _agree(error: str | None, directory) -> None:
    agree(error, ("checkpoints", str(directory)), file=directory)


def _write(path: Path, state: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, lambda file: _save(state, file))
    digest = file_digest(path)
    _replace(path.with_suffix(".sha256"), lambda file: file.write_text(f"{digest}\n"))


def _save(state: dict, path: Path) -> None:
    with path.open("wb") as file:  # a path would be written without saying which error the system gave
        torch.save(state, file)


def _replace(path: Path, write) -> None:
    """``write(temporary path)``, then rename it to ``path``."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _read(directory) -> tuple[int, dict]:
    """Iteration and state of the latest checkpoint of this rank. Raises InputError."""
    latest = Path(directory) / LATEST
    try:
        iteration = int(latest.read_text())
    except (OSError, ValueError):
        raise InputError("there is no checkpoint", file=latest, field="--load") from None
    path = _path(directory, iteration)
    where = dict(file=path, field="--load")
    try:
        expected = path.with_suffix(".sha256").read_text().strip()
        if file_digest(path) != expected:
            raise InputError(f"is damaged: its SHA-256 is not that in {path.with_suffix('.sha256').name}", **where)
        if not zipfile.is_zipfile(path):  # or torch would take it for a file of its older forms
            raise ValueError("is no file of torch.save")
        return iteration, torch.load(path, weights_only=True)
    except InputError:
        raise
    except OSError as failed:
        name = Path(failed.filename).name if failed.filename else path.name
        raise InputError(f"cannot be read: {name}: {failed.strerror}", **where) from None
    except Exception as failed:  # of whatever kind: torch's reader has no error of its own for a file that is made up
        raise InputError(f"is no checkpoint of this example: {_first_line(failed)}", **where) from None


def _load_random_states(state: dict) -> None:
    python_state, numpy_state, torch_state = state["rng"]
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    device_state, tracked = state["cuda_rng"]
    torch.cuda.set_rng_state(device_state)
    get_cuda_rng_tracker().set_states(tracked)


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
        states.append({"common": _without_classes(common), "shards": shards})
    return states


def _without_classes(common: dict) -> dict:
    """Megatron's host optimizer names its classes in every parameter group; a checkpoint holds values alone."""
    if "optimizer" not in common:
        return common
    groups = [
        {name: value for name, value in group.items() if not isinstance(value, type)}
        for group in common["optimizer"]["param_groups"]
    ]
    return {**common, "optimizer": {**common["optimizer"], "param_groups": groups}}


def _main_param(optimizer, parameter) -> torch.Tensor:
    group, order = optimizer.model_param_group_index_map[parameter]
    return optimizer.optimizer.param_groups[group]["params"][order]


@torch.no_grad()
def _load_optimizer(optimizer, states: list) -> None:
    for one, state in zip(_optimizers(optimizer), states, strict=True):
        stepped = "optimizer" in state["common"]
        if stepped:
            saved = state["common"]["optimizer"]
            own_groups = one.optimizer.param_groups
            for group, own in zip(saved["param_groups"], own_groups, strict=True):
                group |= {name: value for name, value in own.items() if isinstance(value, type)}
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
