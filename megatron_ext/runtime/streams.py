"""Streams do work in the order in which it is submitted. Only the issuing thread submits work.

[Note: One issuer]
Only the training thread calls CUDA's driver (and autograd's thread, inside a hook, while the training thread waits for
it). It creates and frees all driver objects: streams, events, page-locked memory. All other threads touch host memory
and flags. Events are made once and recorded again and again: a wait that was issued keeps the record that it was issued
for.

[Note: What a transfer costs the issuing thread]
One copy with its events takes 12 to 15 us of the issuing thread on an H200, where a copy of 4 KiB itself takes 5 us.
``measure`` issues transfers with the same streams and routes. The table holds how long issuing takes
(``group_overhead.call_us``, ``issued_us``), and the simulator keeps the training thread busy for it at every step.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_ext.runtime.flags import DeviceFlag
from megatron_ext.runtime.recorder import CopyLog, event_here
from megatron_ext.runtime.stream_flags import StreamFlags


class Stream(Protocol):
    """The interface of a stream, on both kinds of device.

    Attributes:
        log: the log of its copies, or None.
    """

    log: CopyLog | None

    def run(self, function: Callable[[], object], name: str | None = None) -> None:
        """Queue the work that ``function`` submits to the current stream. ``name``: for traces, if a thread runs it."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, name: str | None = "") -> None:
        """Queue a copy between tensors of one dtype; host memory is page-locked. ``name``: shown in traces; None: the
        copy is counted but not traced."""

    def wait(self, event: Any) -> None:
        """Make later work of this stream wait for ``event``; None: there is nothing to wait for."""

    def record(self, event: Any) -> Any:
        """Record ``event`` after the work queued so far; returns it."""

    def store(self, flag: DeviceFlag, value: int) -> None:
        """Queue the store of ``flag``."""

    def wait_flag(self, flag: DeviceFlag, value: int, check: Callable[[], None]) -> None:
        """Make later work of this stream wait until ``flag`` is at least ``value``. ``check`` raises if the flag will
        never be stored; on a device the watch calls it."""

    def close(self) -> None: ...


class Device:
    """The interface of a CUDA device or the CPU; the defaults are those of the CPU. Only the issuing thread calls its
    methods, see the note above.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        compute: the stream that the calling thread computes on.
        why_no_flags: why streams of this device cannot store flags and wait for them; empty if they can.
    """

    kind: str
    device: torch.device
    compute: Stream
    why_no_flags: str = ""

    def stream(self, name: str) -> Stream:
        """A new stream."""
        raise NotImplementedError

    def event(self) -> Any:
        """A new event for streams of this device."""
        raise NotImplementedError

    def host_tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory, page-locked if copies need it."""
        return torch.zeros(numel, dtype=dtype)

    def resizer(self, storage: torch.UntypedStorage) -> Callable[[int], object]:
        """A function that resizes ``storage`` to a number of bytes."""
        return storage.resize_

    def address_offset(self, memory: torch.Tensor) -> int:
        """Difference between the device's address of a byte in page-locked ``memory`` and its host address."""
        return 0

    def joined(self) -> Callable[[], None]:
        """A function that makes later work of the compute stream wait for the stream that is current at this call."""
        return lambda: None

    def settle(self) -> None:
        """Block this thread until the compute stream has done its queued work."""

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock memory that torch did not allocate, so that copies are asynchronous.

        Raises:
            InputError: the driver refuses; the error gives the bytes and the limit.
        """

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin` of the memory at ``address``."""

    def close(self) -> None:
        """Unlock the memory that is not used any more."""


class CudaStream:
    """A stream of a CUDA device with high priority: its copies are short, and a step waits for them."""

    log: CopyLog | None = None

    def __init__(self, device: torch.device, flags: StreamFlags | None):
        self.stream, self._flags = torch.cuda.Stream(device, priority=-1), flags

    def run(self, function: Callable[[], object], name: str | None = None) -> None:
        with torch.no_grad(), torch.cuda.stream(self.stream):
            function()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, name: str | None = "") -> None:
        assert destination.dtype is source.dtype  # otherwise torch allocates device memory for the cast
        with torch.no_grad(), torch.cuda.stream(self.stream):
            log = self.log
            timed = log is not None and name is not None and log.recorder.recording  # each event costs microseconds
            begin = event_here() if timed else None
            destination.copy_(source, non_blocking=True)
            if log is not None:
                log.count(source.nbytes)
                if begin is not None:
                    log.add(name or "", begin, event_here())

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self.stream.wait_event(event)

    def record(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(self.stream)
        return event

    def store(self, flag: DeviceFlag, value: int) -> None:
        assert isinstance(flag, DeviceFlag) and self._flags is not None
        self._flags.store(self.stream, flag.device_address, value)

    def wait_flag(self, flag: DeviceFlag, value: int, check: Callable[[], None]) -> None:
        assert isinstance(flag, DeviceFlag) and self._flags is not None
        self._flags.wait(self.stream, flag.device_address, value)

    def close(self) -> None:
        """Does nothing: queued work ends before memory is unlocked."""


class ComputeStream(CudaStream):
    """The current stream of the calling thread."""

    def __init__(self, device: torch.device, flags: StreamFlags | None):
        self._device, self._flags = device, flags

    @property
    def stream(self) -> torch.cuda.Stream:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.cuda.current_stream(self._device)


class Arrival:
    """The end of a transfer on a stream; reused by the next transfer of the same group.

    Attributes:
        taken: recorded on the compute stream when the transfer may begin.
        event: recorded on the transfer's stream after the transfer.
    """

    __slots__ = ("taken", "event", "issued", "_compute", "_issuer")

    def __init__(self, device, issuer=None):
        self.taken, self.event, self.issued = device.event(), device.event(), False
        self._compute, self._issuer = device.compute, issuer

    def begin(self) -> "Arrival":
        """The destination belongs to the transfer, after the work given to the compute stream so far."""
        self._compute.record(self.taken)
        self.issued = False
        return self

    def end(self, stream: Stream) -> "Arrival":
        """All work of the transfer has been queued on ``stream``."""
        stream.record(self.event)
        self.issued = True
        return self

    def wait(self) -> None:
        """Make later work of the compute stream wait for the end of the transfer."""
        if not self.issued:
            assert self._issuer is not None
            self._issuer.wait(lambda: self.issued)
        self._compute.wait(self.event)
