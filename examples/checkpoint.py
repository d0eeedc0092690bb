"""Checkpoints of the example. A checkpoint is a directory, in which each rank has one file for each model chunk, one
for the optimizer states of each bucket, and one main file for the rest.

Files are written to a directory with a temporary name, which is renamed when all of them are there. So the last
complete checkpoint always loads. The main file holds the SHA-256 of the others; its own SHA-256 is in a file next to
it. Files hold tensors, numbers and text, and reading one runs no code from it (torch.load with weights_only=True). All
ranks fail with the same line.

Saving and loading need memory for the optimizer states of one bucket, in addition to what training holds. States that
rest on a drive are read and written through mapped files.
"""

import hashlib
import os
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.formats import directory_lock, json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.agreement import agree

LATEST = "latest_checkpointed_iteration.txt"


def claim(directory) -> None:
    """Keep other jobs from saving to ``directory`` until this process ends, and remove what a killed job left.
    Collective.

    Raises:
        InputError: on every rank, if another job saves there or the directory cannot be written.
    """
    error = None
    if dist.get_rank() == 0:
        try:
            os.makedirs(directory, exist_ok=True)
            directory_lock.hold(directory, field="--save")
            json_files.remove_half_written(Path(directory) / LATEST)
            for left in Path(directory).glob("iter_*.tmp"):
                shutil.rmtree(left)
            for left in Path(directory).glob("iter_*.old"):
                if left.with_suffix("").exists():
                    shutil.rmtree(left)
                else:
                    left.rename(left.with_suffix(""))
        except InputError as refused:
            error = str(refused)
        except OSError as refused:
            error = str(InputError(f"cannot be written: {refused.strerror}", field="--save", value=str(directory)))
    _agree(error, directory)


def save(directory, iteration: int, model, optimizer) -> None:
    """Save iteration ``iteration``. All ranks call it, with whole parameters.

    Raises:
        InputError: on every rank, naming the file that could not be written.
    """
    folder, error = _folder(directory, iteration), None
    building = folder.with_suffix(".tmp")
    try:
        _write(building, iteration, model, optimizer)
    except InputError as failed:
        error = str(failed)
    try:
        _agree(error, directory)
    except InputError:
        if dist.get_rank() == 0:
            shutil.rmtree(building, ignore_errors=True)
        raise
    if dist.get_rank() == 0:
        try:
            _put_in_place(building, folder)
            json_files.write_atomically(Path(directory) / LATEST, f"{iteration}\n".encode())
            shutil.rmtree(folder.with_suffix(".old"), ignore_errors=True)
        except InputError as failed:
            error = str(failed)
        except OSError as failed:
            error = str(InputError(f"cannot be written: {failed.strerror}", file=folder, field="--save"))
    _agree(error, directory)


def load(directory, model, optimizer) -> int:
    """Load the latest checkpoint and return its iteration. Collective.

    Raises:
        InputError: on every rank, if there is no checkpoint, a file is damaged, or a run of another shape saved it.
    """
    error, state, iteration, file = None, {}, 0, Path(directory) / LATEST
    try:
        file = _latest(directory) / _name()
        state = _read(file, _digest_beside(file))
    except InputError as refused:
        error = str(refused)
    _agree(error, directory)
    try:
        iteration = int(state["iteration"])
        # The optimizer first: Megatron's host optimizer makes its states with a step, which changes parameters.
        _load_optimizer(optimizer, state["optimizer"], file)
        for number, (chunk, digest) in enumerate(zip(model, state["model"], strict=True)):
            chunk.module.load_state_dict(_read(_part(file, f"model_{number}"), digest, mmap=True))
        _load_random_states(state)
    except InputError as refused:
        error = str(refused)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as failed:
        error = str(
            InputError(f"was saved by a run of another shape: {_first_line(failed)}", file=file, field="--load")
        )
    _agree(error, directory)
    return iteration


def _first_line(failed: Exception) -> str:
    return str(failed).partition("\n")[0] or type(failed).__name__


def _folder(directory, iteration: int) -> Path:
    return Path(directory) / f"iter_{iteration:07d}"


def _name() -> str:
    return f"rank_{dist.get_rank():05d}.pt"


def _part(file: Path, part: str) -> Path:
    return file.with_suffix(f".{part}.pt")


def _agree(error: str | None, directory) -> None:
    agree(error, ("checkpoints", str(directory)), file=directory)


# Files.


def _write(folder: Path, iteration: int, model, optimizer) -> None:
    """Write this rank's files. Raises InputError."""
    file = folder / _name()
    numpy_name, numpy_keys, *numpy_rest = numpy.random.get_state()
    state = {
        "iteration": iteration,
        "model": [
            _write_file(_part(file, f"model_{number}"), chunk.module.state_dict()) for number, chunk in enumerate(model)
        ],
        "optimizer": _write_optimizer(optimizer, file),
        "rng": (random.getstate(), (numpy_name, numpy_keys.tolist(), *numpy_rest), torch.get_rng_state()),
        # Dropout draws from these: the device's own state, and Megatron's states, one per kind of region.
        "cuda_rng": (torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()),
    }
    digest = _write_file(file, state)
    json_files.write_atomically(file.with_suffix(".sha256"), f"{digest}\n".encode())


class _Digested:
    """A file that torch.save writes tensor by tensor, and the digest of the bytes that were written."""

    def __init__(self, file):
        self._file, self.digest, self.flush = file, hashlib.sha256(), file.flush

    def write(self, data) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _write_file(path: Path, content) -> str:
    """Write ``content`` and return its SHA-256. Raises InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            written = _Digested(file)
            torch.save(content, written)
            file.flush()
            os.fsync(file.fileno())
        return written.digest.hexdigest()
    except (OSError, RuntimeError) as failed:
        # While torch's writer handles the file's error, it may raise another one of its own.
        cause = failed if isinstance(failed, OSError) else failed.__context__
        why = cause.strerror if isinstance(cause, OSError) else _first_line(failed)
        place = path.parent.with_suffix("") / path.name
        raise InputError(f"cannot be written: {why}", file=place, field="--save") from None


def _put_in_place(building: Path, folder: Path) -> None:
    """Give a complete checkpoint its name. A checkpoint that had the name stays as .old until the new one is the
    latest."""
    _flush(building)
    if folder.exists():
        shutil.rmtree(folder.with_suffix(".old"), ignore_errors=True)
        folder.rename(folder.with_suffix(".old"))
    building.rename(folder)
    _flush(folder.parent)


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _latest(directory) -> Path:
    """The directory of the latest checkpoint. Raises InputError."""
    latest = Path(directory) / LATEST
    try:
        folder = _folder(directory, int(latest.read_text()))
        replaced = folder.with_suffix(".old")
        return replaced if replaced.exists() and not folder.exists() else folder
    except (OSError, ValueError):  # the number may be too long for a file's name
        raise InputError("there is no checkpoint", file=latest, field="--load") from None


def _digest_beside(file: Path) -> str:
    try:
        return file.with_suffix(".sha256").read_text(errors="replace").strip()
    except OSError as failed:
        raise _unreadable(file, failed) from None


def _unreadable(file: Path, failed: OSError) -> InputError:
    name = Path(failed.filename).name if failed.filename else file.name
    return InputError(f"cannot be read: {name}: {failed.strerror}", file=file, field="--load")


def _read(file: Path, expected: str, mmap: bool = False):
    """The content of ``file``, whose SHA-256 must be ``expected``. With ``mmap``, tensors are read when they are used.
    Raises InputError."""
    where = dict(file=file, field="--load")
    try:
        if file_digest(file) != expected:
            raise InputError("is damaged: its SHA-256 is not the one that was saved", **where)
        if not zipfile.is_zipfile(file):  # torch would read it as one of its older formats
            raise ValueError("is not a file of torch.save")
        return torch.load(file, weights_only=True, mmap=mmap)
    except InputError:
        raise
    except OSError as failed:
        raise _unreadable(file, failed) from None
    except Exception as failed:  # any kind: torch's reader has no error of its own for a file with wrong content
        raise InputError(f"is not a checkpoint of this example: {_first_line(failed)}", **where) from None


def _load_random_states(state: dict) -> None:
    python_state, numpy_state, torch_state = state["rng"]
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    device_state, tracked = state["cuda_rng"]
    torch.cuda.set_rng_state(device_state)
    get_cuda_rng_tracker().set_states(tracked)


# The optimizer: step counts, gradient scaler, and this rank's shards.


def _optimizers(optimizer) -> list:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _buckets(optimizer) -> Iterator[list]:
    """Parameters of each bucket of which this rank updates a part."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            yield from (list(bucket["param_map"]) for bucket in buckets if bucket["param_map"])


def _write_optimizer(optimizer, file: Path) -> list:
    """Write the shards to files of their own, and return what the main file holds of each optimizer."""
    states = []
    for index, one in enumerate(_optimizers(optimizer)):
        digests, stepped = [], len(one.optimizer.state) > 0
        for number, parameters in enumerate(_buckets(one)):
            shards = [
                {name: _alone(tensor) for name, tensor in _tensors(one, parameter, stepped).items()}
                for parameter in parameters
            ]
            digests.append(_write_file(_part(file, f"states_{index}_{number:04d}"), shards))
        # Before the first update Megatron has no states (with fp16, the first steps are skipped).
        common = (
            one.state_dict() if stepped else {"grad_scaler": one.grad_scaler.state_dict() if one.grad_scaler else None}
        )
        states.append({"common": _without_classes(common), "shards": digests})
    return states


def _tensors(one, parameter, stepped: bool) -> dict[str, torch.Tensor]:
    if stepped:
        return one._get_main_param_and_optimizer_states(parameter)
    group, order = one.model_param_group_index_map[parameter]
    return {"param": one.optimizer.param_groups[group]["params"][order]}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy if its storage is larger than the tensor: the whole storage would be written."""
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _without_classes(common: dict) -> dict:
    """``common`` without classes: Megatron's host optimizer puts classes into every parameter group, but a checkpoint
    holds only values."""
    if "optimizer" not in common:
        return common
    groups = [
        {name: value for name, value in group.items() if not isinstance(value, type)}
        for group in common["optimizer"]["param_groups"]
    ]
    return {**common, "optimizer": {**common["optimizer"], "param_groups": groups}}


@torch.no_grad()
def _load_optimizer(optimizer, states: list, file: Path) -> None:
    for index, (one, state) in enumerate(zip(_optimizers(optimizer), states, strict=True)):
        stepped = "optimizer" in state["common"]
        if stepped:
            _load_common(one, state["common"])
        elif one.grad_scaler:
            one.grad_scaler.load_state_dict(state["common"]["grad_scaler"])
        for number, (parameters, digest) in enumerate(zip(_buckets(one), state["shards"], strict=True)):
            shards = _read(_part(file, f"states_{index}_{number:04d}"), digest, mmap=True)
            for parameter, saved in zip(parameters, shards, strict=True):
                for name, tensor in _tensors(one, parameter, stepped).items():
                    if name == "step":  # loaded with the common state; not every optimizer keeps it here
                        continue
                    if tensor.shape != saved[name].shape:
                        raise ValueError(f"{name} has shape {list(saved[name].shape)}, here {list(tensor.shape)}")
                    tensor.copy_(saved[name])
        if stepped and hasattr(one.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            one.optimizer._sync_hdo_state_to_sub_optimizers()  # as Megatron does after it has loaded states


def _load_common(one, common: dict) -> None:
    for group, own in zip(common["optimizer"]["param_groups"], one.optimizer.param_groups, strict=True):
        group |= {name: value for name, value in own.items() if isinstance(value, type)}
    one.load_state_dict(common)
    for own in one.optimizer.state.values():
        # Megatron gives all parameters the same tensor, and each parameter would then increment it.
        if torch.is_tensor(own.get("step")):
            own["step"] = own["step"].clone()
