"""What differs between CUDA devices and the host processor: streams, events, page-locking."""

import contextlib
from functools import cached_property
from typing import Any

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import lock_refused
from megatron_ext.runtime.host_stream import HostCompute, HostEvent, HostStream
from megatron_ext.runtime.page_locked import page_locked, unlock_unused
from megatron_ext.runtime.stream_flags import StreamFlags, open_stream_flags
from megatron_ext.runtime.streams import ComputeStream, CudaStream, Stream


def has_cuda() -> bool:
    """Whether there is a real CUDA device, also where ``torch.cuda.is_available`` has been made to speak of the CPU,
    see :mod:`megatron_ext.megatron.cpu_compat`."""
    available = torch.cuda.is_available
    return not getattr(available, "of_the_processor", False) and available()


class Device:
    """What both kinds offer, as far as there is anything to do on the host; every method belongs to the issuing thread,
    see streams.py.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        compute: the stream that the calling thread computes on.
        why_no_flags: why streams of this device cannot store flags and wait for them; empty: they can.
    """

    kind: str
    device: torch.device
    compute: Stream
    why_no_flags: str = ""

    def stream(self, name: str) -> Stream:
        """A new one."""
        raise NotImplementedError

    def event(self) -> Any:
        """A new one, for streams of this device."""
        raise NotImplementedError

    def host_tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory, page-locked where copies need it."""
        return torch.zeros(numel, dtype=dtype)

    def address_offset(self, memory: torch.Tensor) -> int:
        """What to add to a host address in page-locked ``memory`` to get the device's address of the same byte."""
        return 0

    def synchronize(self, event: Any) -> None:
        """Block this thread until ``event``."""
        event.synchronize()

    def settle(self) -> None:
        """Block this thread until the compute stream has done what it has been given."""

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock memory that torch did not allocate, so that copies are asynchronous.

        Raises:
            InputError: the driver refuses; says the bytes and the limit.
        """

    def unpin(self, tensor: torch.Tensor) -> None:
        """Undo :meth:`pin`."""

    def close(self) -> None:
        """Unlock the memory that nobody uses any more."""


class HostDevice(Device):
    """Parameters live in host memory, and threads do what streams do on a GPU, see host_stream.py."""

    kind, device, compute = "cpu", torch.device("cpu"), HostCompute()

    def stream(self, name: str) -> HostStream:
        return HostStream(name)

    def event(self) -> HostEvent:
        return HostEvent()


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

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def pin(self, tensor: torch.Tensor) -> None:
        runtime: Any = torch.cuda.cudart()  # a module of bindings
        size = tensor.numel() * tensor.element_size()
        code = int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0))
        if code != 0:
            with contextlib.suppress(RuntimeError):  # the runtime keeps the error, and torch raises it behind a kernel
                torch.ones(1, device=self.device)
            why = lock_refused.said(size, f"cudaHostRegister: error {code}")
            raise InputError(why, field="page-locked memory")

    def unpin(self, tensor: torch.Tensor) -> None:
        self.unlock(tensor.data_ptr())

    def unlock(self, address: int) -> None:
        """Undo :meth:`pin` of the memory at ``address``."""
        torch.cuda.synchronize(self.device)  # copies from here may still be on their way
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)

    def close(self) -> None:
        unlock_unused(self)


def device_of(tensor: torch.Tensor) -> Device:
    """The device object for a tensor's device."""
    return CudaDevice(tensor.device) if tensor.device.type == "cuda" else HostDevice()
