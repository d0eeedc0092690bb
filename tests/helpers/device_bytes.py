"""Counts the bytes of device memory that a rank holds while it trains on the CPU, by what it does.

What operations of torch make is the device's, unless all that they read is the host's: page-locked memory
(``HostDevice.host_tensor``), memory that torch did not allocate (pools that ranks share), and what ``cpu()`` or
``to("cpu")`` copies.
"""

import contextlib
import weakref
from unittest import mock

import torch
from strict_memory import tensors_in
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.runtime.device import HostDevice


def phases_of(example) -> list[tuple[object, str, str]]:
    """Functions of the example (the module pretrain_gpt_hybrid), and what their time is called."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # the example has prepared for it

    found = [(example, "build_model_and_optimizer", "build"), (example, "evaluate", "evaluate")]
    found += [(example, "parameter_hash", "hash"), (example.checkpoint, "save", "save")]
    found += [(DistributedOptimizer, "step_with_ready_grads", "step")]
    return found + [(example.hooks, name, name) for name in ("on_train_setup", "finish")]


class DeviceBytes(TorchDispatchMode):
    """Context; ``peaks`` are the most bytes by phase.

    Args:
        phases: owner and name of each function that is a phase, and its name as one; all else is ``train``.
    """

    def __init__(self, phases: list[tuple[object, str, str]]):
        super().__init__()
        self.live, self.peaks, self._phase = 0, {}, "train"
        self._sizes: dict[int, int] = {}  # of storages on the device, by their identity
        self._host: set[int] = set()
        self._phases, self._patches = phases, contextlib.ExitStack()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        read = {one.untyped_storage()._cdata for one in tensors_in((args, list(kwargs.values())))}
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in read and storage._cdata not in self._sizes and storage._cdata not in self._host:
                self._add(storage, on_host=bool(read) and not any(key in self._sizes for key in read))
        return result

    def _add(self, storage, on_host: bool) -> None:
        key = storage._cdata
        if on_host:
            self._host.add(key)
        else:
            self._sizes[key] = 0
            self._resized(key, storage.nbytes())
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self._host.discard(key)
        self.live -= self._sizes.pop(key, 0)

    def _resized(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.live)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which is the host's from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            self.live -= self._sizes.pop(storage._cdata)
            self._host.add(storage._cdata)
        return tensor

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, new, which is the device's from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._host:
            self._host.discard(storage._cdata)
            self._sizes[storage._cdata] = 0
            self._resized(storage._cdata, storage.nbytes())
        return tensor

    def __enter__(self):
        resize, to, host_tensor = torch.UntypedStorage.resize_, torch.Tensor.to, HostDevice.host_tensor
        empty = torch.empty

        def resized(storage, size: int):
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, size)
            return result

        def moved(tensor, *args, **kwargs):
            if args and isinstance(args[0], torch.device) and tensor.untyped_storage()._cdata in self._host:
                return self.to_device(tensor.clone())  # as a copy to a GPU
            result = to(tensor, *args, **kwargs)
            return self.to_host(result) if args[:1] == ("cpu",) and result is not tensor else result

        def made(*args, **kwargs):  # of Megatron's host optimizer
            result = empty(*args, **kwargs)
            return self.to_host(result) if kwargs.get("device") == "cpu" else result

        def copied(tensor):
            return self.to_host(tensor.clone()) if tensor.untyped_storage()._cdata in self._sizes else tensor

        owners = [(torch.UntypedStorage, "resize_", resized), (torch.Tensor, "to", moved)]
        owners += [(torch.Tensor, "cpu", copied), (torch, "empty", made)]
        owners += [(HostDevice, "host_tensor", lambda own, *how: self.to_host(host_tensor(own, *how)))]
        owners += [(owner, name, self._in_phase(getattr(owner, name), phase)) for owner, name, phase in self._phases]
        for owner, name, value in owners:
            self._patches.enter_context(mock.patch.object(owner, name, value))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _in_phase(self, function, phase: str):
        def run(*args, **kwargs):
            before, self._phase = self._phase, phase
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.live)
            try:
                return function(*args, **kwargs)
            finally:
                self._phase = before

        return run
