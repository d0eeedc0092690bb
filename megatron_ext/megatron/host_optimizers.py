"""Parts of Megatron's host optimizer (``--optimizer-cpu-offload``): which parameters are treated separately, and
optimizers for these alone.

HybridDeviceOptimizer steps all parameters with one torch optimizer, or with one each. Chosen parameters are removed
from these and get new optimizers, which it steps after the others. An optimizer updates each parameter independently,
so this changes no value.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core_v0.12 to core_v0.19.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from unittest import mock

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW

chosen_storages: dict[int, tuple[torch.UntypedStorage, str]] = {}
"""By address, the storages whose parameters are treated separately, and how they are treated. Storages are listed only
while a model is built: later another storage could have the address of a freed one."""


def choose(how: str, tensors: Iterable[torch.Tensor]) -> None:
    """Let parameters that lie in the storages of ``tensors`` be treated as ``how`` says."""
    chosen_storages.update((storage._cdata, (storage, how)) for storage in map(torch.Tensor.untyped_storage, tensors))


def is_chosen(how: str, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a storage that was chosen for ``how``."""
    return chosen_storages.get(tensor.untyped_storage()._cdata, (None, None))[1] == how


def forget_chosen() -> None:
    """Clear the choice, when the model is built or before another one is."""
    chosen_storages.clear()


def sort_some(sort_parameters, hybrid, wanted: Callable[[torch.Tensor], bool], offload_fraction: float) -> tuple:
    """The result of Megatron's ``_get_sub_optimizer_param_groups`` for the parameters that are ``wanted``."""
    some = [{**group, "params": [p for p in group["params"] if wanted(p)]} for group in hybrid.param_groups]
    with mock.patch.object(hybrid, "param_groups", some):
        return sort_parameters(hybrid, offload_fraction)


def divide(
    hybrid, chosen: set[torch.Tensor], size: Callable[[torch.Tensor], int] = torch.Tensor.numel, most: float = inf
) -> Iterator[list[dict]]:
    """The parameter groups of each unit. A unit has as many of the ``chosen`` host parameters, in order, as have
    together a ``size`` of at most ``most``."""
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


def own_optimizers(hybrid, units: list[list[dict]]) -> list[FlatAdamW]:
    """Give ``hybrid`` one optimizer per unit, after its own. Their new parameters are not copied to the device here.

    Args:
        hybrid: Megatron's HybridDeviceOptimizer.
        units: the parameter groups of each unit; ``params`` are host tensors that it steps, each in one unit.

    Returns:
        The new optimizers, with the states that their parameters had before.
    """
    assert hybrid.cpu_optimizer_cls is torch.optim.AdamW, "the optimizer is Adam, see refusals.py"
    new = [FlatAdamW(groups) for groups in units]
    states = {parameter: own for one in hybrid.cpu_optimizers for parameter, own in one.state.items()}
    chosen = {parameter: one for one in new for group in one.param_groups for parameter in group["params"]}
    for parameter, own in states.items():  # with a copy of the parameter if a checkpoint was loaded
        if parameter in chosen:
            # The checkpoint's mark for padding (save_from_drive) is removed too, as only tensors can be taken back.
            kept = {name: value for name, value in own.items() if name not in ("master_param", "padding")}
            chosen[parameter].state[parameter] = kept
    for one in hybrid.cpu_optimizers:
        rest = [{**group, "params": [p for p in group["params"] if p not in chosen]} for group in one.param_groups]
        one.param_groups = [group for group in rest if group["params"]]
        for parameter in chosen.keys() & one.state.keys():
            del one.state[parameter]
    hybrid.cpu_optimizers = [one for one in hybrid.cpu_optimizers if one.param_groups] + new
    return new


DELAY_OPTION = "--delayed-parameter-update"


def delay_line(delay: int) -> str:
    """A line for the log that says what the option does."""
    return (
        f"{DELAY_OPTION} {delay}: from iteration {delay + 1} on the host's optimizer steps during the next iteration, "
        "which computes without that update; training is not the same as without the option"
    )


def require_steps_on_host(optimizers: list, delay: int) -> None:
    """Raise InputError if one of Megatron's ``optimizers`` of this rank does not step a parameter on the host."""
    for hybrid in (one.optimizer for one in optimizers):
        copies = getattr(hybrid, "gpu_params_map_cpu_copy", {})
        if any(parameter not in copies for group in hybrid.param_groups for parameter in group["params"]):
            why = "needs an optimizer that steps on the host: --optimizer-cpu-offload with"
            raise InputError(f"{why} --optimizer-offload-fraction 1.0", field=DELAY_OPTION, value=delay)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Learning rate, weight decay and all other settings of each parameter group."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def gradient_of(shard: torch.Tensor) -> torch.Tensor | None:
    """The gradient that Megatron's optimizer uses for ``shard``, or None."""
    return getattr(shard, "decoupled_grad", shard.grad)


@contextmanager
def without(hybrid, optimizers: Collection[torch.optim.Optimizer]) -> Iterator[list[torch.optim.Optimizer]]:
    """Remove ``optimizers`` from those that ``hybrid`` steps, for as long as the context lasts. Yields them in the
    order in which it steps them."""
    everything = hybrid.cpu_optimizers
    hybrid.cpu_optimizers = [one for one in everything if one not in optimizers]
    try:
        yield [one for one in everything if one in optimizers]
    finally:
        hybrid.cpu_optimizers = everything


def refuse_late_load(hybrid) -> None:
    """Refuse states that are loaded after this call, because Megatron would then make new optimizers."""
    hybrid.register_load_state_dict_pre_hook(_refuse)


def _refuse(*_) -> None:
    raise ScheduleError(
        "states of an optimizer that steps during the backward, or from the drive, must be loaded before training "
        "begins"
    )
