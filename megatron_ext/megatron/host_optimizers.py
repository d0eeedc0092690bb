"""Parts of Megatron's host optimizer (``--optimizer-cpu-offload``): which parameters are treated apart, and optimizers
of their own.

HybridDeviceOptimizer steps all parameters by one optimizer of torch, or by one each. Chosen parameters are taken out of
these and get new ones, which it steps behind the others. An optimizer updates each parameter by itself, so the division
changes no value.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, the same in core_v0.12 to core_v0.19.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from math import inf

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW

chosen_storages: dict[int, tuple[torch.UntypedStorage, str]] = {}
"""By address, storages whose parameters are treated apart, and how. They are held while a model is built, and no
longer: another storage could have the address of one that is gone."""


def choose(how: str, tensors: Iterable[torch.Tensor]) -> None:
    """What lies in the storages of ``tensors`` is treated as ``how`` says."""
    chosen_storages.update((storage._cdata, (storage, how)) for storage in map(torch.Tensor.untyped_storage, tensors))


def is_chosen(how: str, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a storage that was chosen for ``how``."""
    return chosen_storages.get(tensor.untyped_storage()._cdata, (None, None))[1] == how


def forget_chosen() -> None:
    """The model is built, or another one will be."""
    chosen_storages.clear()


def sort_some(sort_parameters, hybrid, wanted: Callable[[torch.Tensor], bool], offload_fraction: float) -> tuple:
    """What Megatron's ``_get_sub_optimizer_param_groups`` returns for the parameters that are wanted."""
    everything = hybrid.param_groups
    hybrid.param_groups = [{**group, "params": [p for p in group["params"] if wanted(p)]} for group in everything]
    try:
        return sort_parameters(hybrid, offload_fraction)
    finally:
        hybrid.param_groups = everything


def divide(
    hybrid, chosen: set[torch.Tensor], size: Callable[[torch.Tensor], int] = torch.Tensor.numel, most: float = inf
) -> Iterator[list[dict]]:
    """Parameter groups of each unit: as many of the host parameters ``chosen`` in order as have at most ``most`` bytes
    by ``size``."""
    unit: dict[int, dict] = {}
    used = 0
    for number, group in enumerate(hybrid.cpu_param_groups):
        for parameter in (one for one in group["params"] if one in chosen):
            if unit and used + size(parameter) > most:
                yield list(unit.values())
                unit, used = {}, 0
            unit.setdefault(number, {**group, "params": []})["params"].append(parameter)
            used += size(parameter)
    if unit:
        yield list(unit.values())


def own_optimizers(hybrid, units: list[list[dict]]) -> list[torch.optim.Optimizer]:
    """Give ``hybrid`` one optimizer a unit, behind those that it has. Nobody copies their new parameters to the device.

    Args:
        hybrid: Megatron's HybridDeviceOptimizer.
        units: parameter groups of each: ``params`` are host tensors that it steps, each in one unit.

    Returns:
        The new optimizers, with the states that their parameters had.
    """
    kind = hybrid.cpu_optimizer_cls
    flat = kind is torch.optim.AdamW and all(group["fused"] for groups in units for group in groups)
    new = [FlatAdamW(groups) if flat else _without_device_calls(kind(groups)) for groups in units]
    states = {parameter: own for one in hybrid.cpu_optimizers for parameter, own in one.state.items()}
    chosen = {parameter: one for one in new for group in one.param_groups for parameter in group["params"]}
    for parameter, own in states.items():  # after a checkpoint was loaded, with a copy of the parameter among them
        if parameter in chosen:
            # Nor what a checkpoint says of the shard, see save_from_drive: a step is taken back by tensors.
            kept = {name: value for name, value in own.items() if name not in ("master_param", "padding")}
            chosen[parameter].state[parameter] = kept
    for one in hybrid.cpu_optimizers:
        rest = [{**group, "params": [p for p in group["params"] if p not in chosen]} for group in one.param_groups]
        one.param_groups = [group for group in rest if group["params"]]
        for parameter in chosen.keys() & one.state.keys():
            del one.state[parameter]
    hybrid.cpu_optimizers = [one for one in hybrid.cpu_optimizers if one.param_groups] + new
    return new


def _without_device_calls(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer`` without torch's question, at every step, whether a CUDA graph is being captured: that calls the
    driver, with the interpreter's lock held, and the host's optimizer steps on other threads than the issuing one."""
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, lambda: None)
    return optimizer


DELAY_OPTION = "--delayed-parameter-update"


def delay_line(delay: int) -> str:
    """What the option does, for the reader of a log."""
    return (
        f"{DELAY_OPTION} {delay}: from iteration {delay + 1} on the host's optimizer steps during the next iteration, "
        "which computes without that update; training is not the same as without the option"
    )


def require_steps_on_host(optimizers: list, delay: int) -> None:
    """Raises InputError where one of Megatron's ``optimizers`` of this rank steps a parameter elsewhere."""
    for one in optimizers:
        stepped = [parameter for group in one.optimizer.param_groups for parameter in group["params"]]
        copies_of(one.optimizer, stepped, "needs", DELAY_OPTION, delay)


def copies_of(
    hybrid, shards: list[torch.Tensor], what: str, field: str, value: object = ...
) -> dict[torch.Tensor, torch.Tensor]:
    """The host's parameters by shard. Raises InputError: ``what`` needs them, and some shard has none."""
    copies = getattr(hybrid, "gpu_params_map_cpu_copy", {})
    if any(shard not in copies for shard in shards):
        why = "an optimizer that steps on the host: --optimizer-cpu-offload with --optimizer-offload-fraction 1.0"
        raise InputError(f"{what} {why}", field=field, value=value)
    return {shard: copies[shard] for shard in shards}


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Learning rate, weight decay and all else of each parameter group."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def gradient_of(shard: torch.Tensor) -> torch.Tensor | None:
    """What Megatron steps on."""
    return getattr(shard, "decoupled_grad", shard.grad)


@contextmanager
def without(hybrid, optimizers: Collection[torch.optim.Optimizer]) -> Iterator[list[torch.optim.Optimizer]]:
    """Take ``optimizers`` out of those that ``hybrid`` steps, for as long as the context lasts. Gives them in the
    order in which it steps them."""
    everything = hybrid.cpu_optimizers
    hybrid.cpu_optimizers = [one for one in everything if one not in optimizers]
    try:
        yield [one for one in everything if one in optimizers]
    finally:
        hybrid.cpu_optimizers = everything


def refuse_late_load(hybrid) -> None:
    """Refuse states that are loaded after this call: Megatron would make its optimizers anew."""
    hybrid.register_load_state_dict_pre_hook(_refuse)


def _refuse(*_) -> None:
    raise ScheduleError(
        "states of an optimizer that steps during the backward, or from the drive, are loaded before training begins, "
        "not after"
    )
