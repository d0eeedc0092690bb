"""The device of a tensor: a CUDA device or the CPU."""

import contextlib
from functools import cached_property
from typing import Any

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import lock_refused
from megatron_ext.runtime.host_device import HostDevice
from megatron_ext.runtime.page_locked import page_locked, unlock_unused
from megatron_ext.runtime.stream_flags import StreamFlags, open_stream_flags
from megatron_ext.runtime.streams import ComputeStream, CudaStream, Device


def has_cuda() -> bool:
    """Whether there is a real CUDA device, even after ``torch.cuda.is_available`` was replaced to describe the CPU,
    see :mod:`megatron_ext.megatron.cpu_compat`."""
    available = torch.cuda.is_available
    return not getattr(available, "of_the_processor", False) and available()


class CudaDevice(Device):
    """See :class:`Device`."""

    kind = "cuda"

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def _flags(self) -> tuple[StreamFlags | None, str]:
        return open_stream_flags(self.device)

    @cached_property
    def why_no_flags(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._flags[1]

    @cached_property
    def compute(self) -> ComputeStream:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ComputeStream(self.device, self._flags[0])

    def stream(self, name: str) -> CudaStream:
        return CudaStream(self.device, self._flags[0])

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def host_tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return page_locked(numel, dtype, self)

    def address_offset(self, memory: torch.Tensor) -> int:
        flags = self._flags[0]
        return 0 if flags is None or memory.numel() == 0 else flags.offset(memory)

    def joined(self):
        stream, event = torch.cuda.current_stream(self.device), self.event()
        return lambda: self.compute.wait(stream.record_event(event))  # pyright: ignore[reportArgumentType] - a subclass

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def pin(self, tensor: torch.Tensor) -> None:
        runtime: Any = torch.cuda.cudart()  # a module of bindings
        size = tensor.numel() * tensor.element_size()
        code = int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0))
        if code != 0:
            with contextlib.suppress(RuntimeError):  # torch would raise the kept error behind a later kernel
                torch.ones(1, device=self.device)
            why = lock_refused.said(size, f"cudaHostRegister: error {code}")
            raise InputError(why, field="page-locked memory")

    def unpin(self, address: int) -> None:
        torch.cuda.synchronize(self.device)  # copies from this memory may still be running
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)

    def close(self) -> None:
        unlock_unused(self)


def device_of(tensor: torch.Tensor) -> Device:
    """The device object for a tensor's device."""
    return CudaDevice(tensor.device) if tensor.device.type == "cuda" else HostDevice()
