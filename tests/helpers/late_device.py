"""A stand-in for CUDA's streams whose work happens as late, or as early, as its events allow.

What is issued on a stream is only noted. ``late``: it is done when somebody waits for an event behind it;
``early``: at once where nothing that it must wait for is missing, but compute is always late. Who forgets
an event reads old bytes in one of them. Real devices do anything in between.
"""

import contextlib
import threading
from types import SimpleNamespace

import torch


class Stream:
    """Work in order; waiting for an event of another stream does that one's work first."""

    def __init__(self, device: "LateDevice", early: bool = False):
        self.device, self.early, self.work, self.done = device, early, [], 0

    def add(self, function) -> None:
        with self.device.lock:
            self.work.append((None, function))
            self.advance()

    def wait_event(self, event: "Event") -> None:
        with self.device.lock:
            self.work.append((event, event.synchronize))
            self.advance()

    def advance(self) -> None:
        while (
            self.early
            and self.done < len(self.work)
            and (self.work[self.done][0] is None or self.work[self.done][0].query())
        ):
            self.run(self.done + 1)

    def run(self, until: int) -> None:
        while self.done < until:
            _, function = self.work[self.done]
            self.done += 1
            function()


class Event:
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        self.stream, self.until = stream, len(stream.work)

    def query(self) -> bool:
        return self.stream.done >= self.until

    def synchronize(self) -> None:
        with self.stream.device.lock:
            self.stream.run(self.until)


class LateDevice:
    """Puts itself in torch.cuda's place; ``compute(function)`` is work of the training thread's stream."""

    def __init__(self, monkeypatch, early: bool):
        self.lock, self._here = threading.RLock(), threading.local()
        self.default, self.pinned = Stream(self), set()
        copy = torch.Tensor.copy_

        def copy_(destination, source, non_blocking: bool = False):
            stream = getattr(self._here, "stream", None)
            if stream is None:
                return copy(destination, source)
            assert non_blocking, "a copy on a stream that blocks the thread"
            stream.add(lambda: copy(destination, source))
            return destination

        @contextlib.contextmanager
        def on(stream):
            self._here.stream = stream
            try:
                yield
            finally:
                self._here.stream = None

        runtime = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: self.pinned.add(address) or 0,
            cudaHostUnregister=self.pinned.remove,
        )
        for name, value in {
            "Stream": lambda device, priority: Stream(self, early),
            "Event": lambda blocking=False: Event(),
            "current_stream": lambda device=None: self.default,
            "stream": on,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device=None: self.synchronize(),
            "cudart": lambda: runtime,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_)

    def compute(self, function) -> None:
        self.default.add(function)

    def synchronize(self) -> None:
        with self.lock:
            self.default.run(len(self.default.work))
