"""Leave out memory that Megatron allocates before training begins and that a schedule does not use.

[Note: Why copies are left out]
HybridDeviceOptimizer copies every parameter to the host in fp32 when it is built, and DistributedOptimizer builds it
twice: 8 bytes per parameter at a time when the drive holds nothing yet. The copy of a parameter whose states will rest
on the drive is left out: a single NaN, expanded to the parameter's shape, stands in for it. :mod:`scheduled_host_step`
writes the parameter itself to the drive, in fp32, one slot after the other. If something needs the copies and their
moments earlier (a checkpoint is loaded), they are made then, in files on the drive that are mapped into memory: see
drive_tensors.py.

[Note: Why gradients are left out]
DistributedDataParallel makes whole gradients of all parameters. :mod:`buckets` drops them and makes the gradients that
the schedule keeps. Until then a single zero, expanded to their shape, stands in for them. If parameters never fit
whole, there is no buffer of parameters either, see late_model.py.
"""

# Functions of Megatron are replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

import gc
from collections.abc import Callable, Collection, Iterable
from functools import partial, partialmethod
from math import nan
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as upstream
from torch.overrides import TorchFunctionMode

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.host_optimizers import choose, is_chosen, sort_some
from megatron_ext.megatron.late_model import make_states_only
from megatron_ext.megatron.releases import host_optimizer_class
from megatron_ext.runtime import lock_refused
from megatron_ext.runtime.drive_tensors import DriveTensors
from megatron_ext.runtime.host_step.flat_adamw import MOMENTS

HybridDeviceOptimizer = host_optimizer_class()

LEFT_OUT = "left out"


def leave_copies_out(parameters: Iterable[torch.Tensor], directory) -> None:
    """Let host optimizers that are built from now on have no copies of parameters in the storages of ``parameters``.
    Copies that are needed before training are made in files in ``directory``, on the drive."""
    choose(LEFT_OUT, parameters)
    if not hasattr(HybridDeviceOptimizer, "left_out"):
        sort_parameters = HybridDeviceOptimizer._get_sub_optimizer_param_groups
        HybridDeviceOptimizer._get_sub_optimizer_param_groups = lambda *given: _sorted(sort_parameters, *given)
    HybridDeviceOptimizer.left_out = LeftOut(directory)


class LeftOut:
    """Copies of one host optimizer that are not in memory, see [Note: Why copies are left out].

    Attributes:
        stand_ins, on_drive: by the optimizer's parameters, copies that have no values yet, and copies that have.
    """

    def __init__(self, directory):
        self.directory, self.files = directory, []
        self.stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        self.on_drive: dict[torch.Tensor, torch.Tensor] = {}

    def of(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy of ``parameter``, or the stand-in for it."""
        if parameter in self.on_drive:
            return self.on_drive[parameter]
        self.stand_ins[parameter] = made = torch.full((), nan, dtype=dtype).expand(parameter.shape)
        return made

    @torch.no_grad()
    def make_copies(self, *_) -> None:
        """Make the copies that have stand-ins, with their values, on the drive."""
        for dtype in {copy.dtype for copy in self.stand_ins.values()}:
            chosen = [(parameter, copy) for parameter, copy in self.stand_ins.items() if copy.dtype == dtype]
            places = self._tensors([copy.shape for _, copy in chosen], dtype)
            for (parameter, copy), place in zip(chosen, places, strict=True):
                copy.data = place.copy_(parameter.detach())
        self.on_drive |= self.stand_ins
        self.stand_ins = {}

    def make_states(self, hybrid) -> None:
        """Replaces Megatron's ``dummy_step``, which allocates a gradient of every parameter and all states. States of
        copies that are left out are made on the drive, all other states by a step with zero gradients."""
        self.make_copies()
        chosen = set(self.on_drive.values())
        make_states_only(hybrid, without=chosen)
        for optimizer in hybrid.cpu_optimizers:
            for group in optimizer.param_groups:
                copies = [copy for copy in group["params"] if copy in chosen]
                for name in MOMENTS if copies else ():
                    places = self._tensors([copy.shape for copy in copies], torch.float32)
                    for copy, place in zip(copies, places, strict=True):
                        optimizer.state[copy] |= {"step": torch.ones((), dtype=torch.float32), name: place}
        hybrid._sync_sub_optimizers_state_to_hdo()

    def _tensors(self, shapes: list[torch.Size], dtype: torch.dtype) -> list[torch.Tensor]:
        self.files.append(DriveTensors(self.directory, shapes, dtype))
        return self.files[-1].tensors


def _sorted(sort_parameters, hybrid, offload_fraction: float):
    """The result of Megatron's function, with stand-ins for some copies."""
    late = lambda parameter: parameter.numel() > 1 and is_chosen(LEFT_OUT, parameter)
    everything = hybrid.param_groups
    if offload_fraction != 1.0 or not any(late(p) for group in everything for p in group["params"]):
        return sort_parameters(hybrid, offload_fraction)
    rest = lambda parameter: not late(parameter)
    host, device, copies, originals, in_fp32 = sort_some(sort_parameters, hybrid, rest, offload_fraction)
    if "left_out" not in vars(hybrid):
        _install(hybrid, LeftOut(hybrid.left_out.directory))
    for group in everything:
        chosen = [parameter for parameter in group["params"] if late(parameter)]
        for parameter in chosen:
            dtype = torch.float32 if hybrid.param_update_in_fp32 else parameter.dtype
            copies[parameter] = copy = hybrid.left_out.of(parameter, dtype)
            originals[copy] = parameter
            if dtype != parameter.dtype:
                in_fp32[parameter] = copy
        if chosen:
            host.append({**group, "params": [copies[parameter] for parameter in chosen]})
    return host, device, copies, originals, in_fp32


def _install(hybrid, left_out: LeftOut) -> None:
    """Let functions that need copies or states before training make them first."""

    def update_by_new() -> None:
        left_out.make_copies()
        HybridDeviceOptimizer.update_fp32_param_by_new_param(hybrid)

    hybrid.register_step_pre_hook(left_out.make_copies)
    hybrid.register_load_state_dict_pre_hook(left_out.make_copies)
    vars(hybrid).update(
        left_out=left_out,
        update_fp32_param_by_new_param=update_by_new,
        dummy_step=partial(left_out.make_states, hybrid),
    )


def tell_what_is_not_locked() -> None:
    """Let host optimizers use other memory for tensors that the driver does not page-lock, while they are built and
    while a checkpoint's states are made. :func:`flush` raises the error later: if one rank raised at once, the others
    would wait for it in Megatron's next collective."""
    if not hasattr(HybridDeviceOptimizer, "not_locked"):
        HybridDeviceOptimizer.not_locked = None
        for name in ("_init_sub_optimizers", "dummy_step"):
            setattr(HybridDeviceOptimizer, name, partialmethod(_lock_or_tell, getattr(HybridDeviceOptimizer, name)))


def _lock_or_tell(hybrid, method: Callable) -> None:
    def lock_or_tell(tensor, *given):
        try:
            return lock(tensor, *given)
        except RuntimeError as error:
            hybrid.not_locked = lock_refused.said(tensor.nbytes, str(error).partition("\n")[0])
            return tensor

    def make_or_tell(*shape, pin_memory=False, **options):
        made = make(*shape, **options)
        return lock_or_tell(made) if pin_memory else made

    lock, make = torch.Tensor.pin_memory, torch.empty
    with mock.patch.object(torch.Tensor, "pin_memory", lock_or_tell), mock.patch.object(torch, "empty", make_or_tell):
        method(hybrid)


def make_gradients(optimizers: list, units: Collection[torch.optim.Optimizer]) -> None:
    """Allocate the tensors that Megatron's host optimizers, except ``units``, copy gradients to, as their first step
    would. Raises InputError if these cannot be page-locked."""

    def make(hybrid) -> None:
        groups = [group for one in hybrid.cpu_optimizers if one not in units for group in one.param_groups]
        for copy in (copy for group in groups for copy in group["params"] if copy not in hybrid.cpu_copy_map_grad):
            copy.grad = torch.empty(copy.shape, dtype=copy.dtype, device="cpu", pin_memory=hybrid.pin_cpu_grads).zero_()
            hybrid.cpu_copy_map_grad[copy] = copy.grad

    for hybrid in (one.optimizer for one in optimizers if isinstance(one.optimizer, HybridDeviceOptimizer)):
        _lock_or_tell(hybrid, make)
    flush(optimizers)


def flush(optimizers: list) -> None:
    """Write what was made for Megatron's ``optimizers`` to the drive, and free its pages in memory. Raises InputError
    if it did not reach the drive, or if memory of an optimizer could not be page-locked."""
    gc.collect()  # the host optimizer that DistributedOptimizer has replaced is a cycle with copies of all parameters
    for optimizer in optimizers:
        hybrid = getattr(optimizer, "optimizer", None)
        if (refused := getattr(hybrid, "not_locked", None)) is not None:
            raise InputError(f"rank {dist.get_rank()}: {refused}", field="page-locked memory")
        for file in getattr(getattr(hybrid, "left_out", None), "files", ()):
            file.flush()


def take_over(hybrid, chosen: set[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """The parameters of ``hybrid`` by those of their copies that have no values, all of which are in ``chosen``. The
    caller makes the copies."""
    left_out = vars(hybrid).get("left_out")
    if left_out is None:
        return {}
    found = {copy: parameter for parameter, copy in left_out.stand_ins.items()}
    assert found.keys() <= chosen, "a copy is missing"
    left_out.stand_ins, left_out.on_drive, left_out.files = {}, {}, []
    return found


class _Without(TorchFunctionMode):
    """In this mode the first ``torch.zeros`` of dtype ``parameters`` returns None, and ``torch.zeros`` of dtype
    ``gradients`` allocate only one element. A dtype of None matches nothing."""

    def __init__(self, parameters: torch.dtype | None, gradients: torch.dtype | None):
        super().__init__()
        self._parameters, self._gradients = parameters, gradients

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype") if function is torch.zeros else None
        if dtype is not None and dtype is self._parameters:  # Megatron makes parameters before gradients
            self._parameters = None
            return None
        if dtype is not None and dtype is self._gradients:
            return function(1, **kwargs).expand(*args)
        return function(*args, **kwargs)


def leave_buffers_out(gradients: Callable[[], bool], parameters: Callable[[], bool]) -> None:
    """Leave gradients out of buffers that are built while ``gradients()`` is true, and parameters, as without a
    distributed optimizer, while ``parameters()`` is true. Replaces the functions of an earlier call."""
    Buffer = upstream._ParamAndGradBuffer
    if not hasattr(Buffer, "without_gradients"):
        build = Buffer.__init__

        def build_without(buffer, ddp_config, param_dtype, grad_dtype, *more, **named) -> None:
            shared = getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
            late = not shared and Buffer.without_parameters()
            left = not shared and Buffer.without_gradients() and (late or param_dtype != grad_dtype)
            with _Without(param_dtype if late else None, grad_dtype if left else None):
                build(buffer, ddp_config, param_dtype, grad_dtype, *more, **named)
            assert not late or buffer.param_data is None, "Megatron's buffer has parameters"

        Buffer.__init__ = build_without
    Buffer.without_gradients, Buffer.without_parameters = staticmethod(gradients), staticmethod(parameters)
