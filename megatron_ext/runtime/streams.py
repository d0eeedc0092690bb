"""Streams: work in the order in which it is given. The issuing thread alone gives work to them.

[Note: One issuer]
Only the training thread calls CUDA's driver (and autograd's thread, inside of a hook, while the training thread waits
for it). It creates and frees everything that the driver knows: streams, events, page-locked memory. All other threads
touch host memory and flags. Events are made once and recorded again and again: a wait that was issued keeps the record
that it was issued for.

[Note: What a transfer costs the issuing thread]
12 to 15 us for one copy with its events on an H200, whose copy of 4 KiB takes 5 us. ``measure`` issues transfers by the
same streams and routes, the table holds how long that takes (``group_overhead.call_us``, ``issued_us``), and the
simulator keeps the training thread busy for it at every step.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_ext.runtime.flags import DeviceFlag
from megatron_ext.runtime.recorder import CopyLog, event_here
from megatron_ext.runtime.stream_flags import StreamFlags


class Stream(Protocol):
    """What both kinds of device offer.

    Attributes:
        log: of its copies, or None.
    """

    log: CopyLog | None

    def run(self, function: Callable[[], object], name: str | None = None) -> None:
        """Queue the work that ``function`` gives to the current stream. ``name``: in traces, where a thread does it."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, name: str | None = "") -> None:
        """Queue a copy between tensors of one dtype; host memory is page-locked. ``name``: in traces; None: it is
        counted alone."""

    def wait(self, event: Any) -> None:
        """What is queued from now on comes behind ``event``; None: at once."""

    def record(self, event: Any) -> Any:
        """``event`` is what has been queued so far; returns it."""

    def store(self, flag: DeviceFlag, value: int) -> None:
        """Queue the store of ``flag``."""

    def wait_flag(self, flag: DeviceFlag, value: int, check: Callable[[], None]) -> None:
        """What is queued from now on waits until ``flag`` is at least ``value``. ``check`` raises where nobody stores
        it any more; the watch calls it where a device waits."""

    def close(self) -> None: ...


class Device:
    """What CUDA devices and the host processor offer, as far as there is anything to do on the host. Every method
    belongs to the issuing thread, see the note above.

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


class CudaStream:
    """A stream of a CUDA device, in which copies come before kernels of other streams: they are short, and a step waits
    for them."""

    log: CopyLog | None = None

    def __init__(self, device: torch.device, flags: StreamFlags | None):
        self.stream, self._flags = torch.cuda.Stream(device, priority=-1), flags

    def run(self, function: Callable[[], object], name: str | None = None) -> None:
        with torch.no_grad(), torch.cuda.stream(self.stream):
            function()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, name: str | None = "") -> None:
        assert destination.dtype is source.dtype  # or torch takes more of the device to cast in
        with torch.no_grad(), torch.cuda.stream(self.stream):
            log = self.log
            timed = log is not None and name is not None and log.recorder.recording  # events cost microseconds each
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
        """Nothing: what is queued ends before memory is unlocked."""


class ComputeStream(CudaStream):
    """The stream on which the calling thread computes now."""

    def __init__(self, device: torch.device, flags: StreamFlags | None):
        self._device, self._flags = device, flags

    @property
    def stream(self) -> torch.cuda.Stream:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.cuda.current_stream(self._device)


class Arrival:
    """The end of a transfer on a stream, used again by the next transfer of the same group.

    Attributes:
        taken: recorded on the compute stream when the transfer may begin.
        event: recorded on the transfer's stream behind it.
    """

    __slots__ = ("taken", "event", "issued", "_compute", "_issuer")

    def __init__(self, device, issuer=None):
        self.taken, self.event, self.issued = device.event(), device.event(), False
        self._compute, self._issuer = device.compute, issuer

    def begin(self) -> "Arrival":
        """The destination belongs to the transfer, behind what the compute stream has been given."""
        self._compute.record(self.taken)
        self.issued = False
        return self

    def end(self, stream: Stream) -> "Arrival":
        """Everything of the transfer is queued on ``stream``."""
        stream.record(self.event)
        self.issued = True
        return self

    def wait(self) -> None:
        """What the compute stream is given from now on finds the transfer done."""
        if not self.issued:
            assert self._issuer is not None
            self._issuer.wait(self._is_issued)
        self._compute.wait(self.event)

    def _is_issued(self) -> bool:
        return self.issued
