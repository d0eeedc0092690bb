"""What differs between CUDA devices and the host processor: streams, events, pinning.

The CUDA half is written for PyTorch's stream semantics and has not yet been run on a GPU;
``benchmarks/README.md`` says which command does.

[Note: What a transfer costs the training thread]
Issuing a transfer on CUDA is some ten calls of torch's (stream, events, copy or collective), by general knowledge 20 to
40 us, however few bytes it has. What the compiled program adds to them is what benchmarks/hot_path.py measures. So the
cost is measured, not promised: ``measure`` issues transfers by the same lanes and routes, the table holds how long that
takes (``group_overhead.call_us``, ``issued_us``), and the simulator keeps the training thread busy for it at every
step, so that a plan with many small groups is worth what it is worth.
"""

from functools import cached_property
from time import perf_counter_ns
from typing import Any

import torch

from megatron_ext.runtime import slow_links
from megatron_ext.runtime.page_locked import page_locked
from megatron_ext.runtime.recorder import event_here
from megatron_ext.runtime.stream_flags import StreamFlags, open_stream_flags


def has_cuda() -> bool:
    """Whether there is a real CUDA device.

    ``torch.cuda.is_available`` is Python and may be made to speak of the CPU instead, see
    :mod:`megatron_ext.megatron.cpu_compat`; what it asks in the end cannot.
    """
    return hasattr(torch._C, "_cuda_getDeviceCount") and torch._C._cuda_getDeviceCount() > 0


class HostDevice:
    """Parameters live in host memory; a copy is done when ``copy_`` returns."""

    kind, device = "cpu", torch.device("cpu")
    flags = None
    why_threads = ""

    def leave_flags_to_threads(self, why: str) -> None:
        """They are."""

    def copy_stream(self):
        return None

    def current_stream(self):
        return None

    def on_stream(self, function, stream, after):
        """Call ``function``; what it does has ended then, and there is nothing to wait for."""
        function()

    def host_tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory, page-locked where copies need it."""
        return torch.zeros(numel, dtype=dtype)

    def mark(self):
        """Work that a copy issued later must come after: nothing, the caller has done it."""
        return None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream, after, marks: list | None = None):
        """Copy and return what the reader must wait for (None: it is done); ``marks``: begin and end are appended, by
        the clock."""
        with slow_links.host_link(source.nbytes):
            start = perf_counter_ns() if marks is not None else 0
            destination.copy_(source)
        if marks is not None:
            marks += [start, perf_counter_ns()]
        return None

    def synchronize(self, event) -> None:
        """Block this thread until ``event``: a mark, or the end of what was issued on a stream; None: at once."""

    def settle(self) -> None:
        """Block this thread until what the current stream has been given is done."""

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock memory for asynchronous copies: nothing to do on the host."""

    def unpin(self, tensor: torch.Tensor) -> None:
        """Undo :meth:`pin`."""


class CudaDevice:
    """Copies run on streams of their own and are ordered by events."""

    kind = "cuda"

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def _stream_flags(self) -> tuple[StreamFlags | None, str]:
        return open_stream_flags(self.device)

    def leave_flags_to_threads(self, why: str) -> None:
        """No stream waits for a flag: the thread that has to store it may need the driver, whose lock another thread
        holds until the stream has got on. ``why``: which flags threads store."""
        self.__dict__["_stream_flags"] = None, why

    @property
    def flags(self) -> StreamFlags | None:
        """By which streams store flags and wait for them; None: threads do."""
        return self._stream_flags[0]

    @property
    def why_threads(self) -> str:
        """Why :attr:`flags` is None."""
        return self._stream_flags[1]

    def host_tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return page_locked(numel, dtype, self)

    def sleep(self, stream, seconds: float) -> None:
        """Keep ``stream`` busy, about so long: a fault of tests."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * 1.5e9))  # cycles

    def copy_stream(self):
        # High priority: a copy is short and a step waits for it.
        return torch.cuda.Stream(self.device, priority=-1)

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream, recorded by the thread that issues the compute."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream, after, marks: list | None = None):
        """Issue a copy on ``stream`` behind ``after``; returns the event of its end. ``marks``: begin and end on the
        stream are appended, as timed events."""

        def copy() -> None:
            begin = event_here() if marks is not None else None
            destination.copy_(source, non_blocking=True)
            if marks is not None:
                marks.extend((begin, event_here()))

        return self.on_stream(copy, stream, after)

    def on_stream(self, function, stream, after):
        """Call ``function``, whose work goes on ``stream`` behind ``after``; returns the event of its end."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):  # a thread begins on device 0
            if after is not None:
                stream.wait_event(after)
            function()
            event = torch.cuda.Event(blocking=True)  # who waits on the host leaves its processor to others
            event.record(stream)
        return StreamWait(event, self.device)

    def synchronize(self, event) -> None:
        if event is not None:
            with torch.cuda.device(self.device):  # a thread begins on device 0, and would make a context there
                (event.event if isinstance(event, StreamWait) else event).synchronize()

    def current_stream(self):
        return torch.cuda.current_stream(self.device)

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock shared memory that torch did not allocate, so that copies are asynchronous.

        Raises:
            RuntimeError: the driver refuses (too much locked memory, for example).
        """
        runtime: Any = torch.cuda.cudart()  # a module of bindings
        size = tensor.numel() * tensor.element_size()
        code = int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister of {size} bytes failed with error {code}")

    def unpin(self, tensor: torch.Tensor) -> None:
        self.unlock(tensor.data_ptr())

    def unlock(self, address: int) -> None:
        """Undo :meth:`pin` of the memory at ``address``."""
        torch.cuda.synchronize(self.device)  # copies from here may still be on their way
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)


class StreamWait:
    """``wait()`` makes the waiting thread's current stream wait for an event."""

    __slots__ = ("event", "device")

    def __init__(self, event: torch.cuda.Event, device: torch.device):
        self.event, self.device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def finished(self, device) -> None:
        """Block the calling thread until the event."""
        device.synchronize(self)


def device_of(tensor: torch.Tensor):
    """The device object for a tensor's device."""
    return CudaDevice(tensor.device) if tensor.device.type == "cuda" else HostDevice()
