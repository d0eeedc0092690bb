"""In place of torch's streams and events, and of the driver's flags, on the engine of the strict stand-in."""

import ctypes
import itertools
from types import SimpleNamespace

from strict_engine import Engine, Stream

OFFSET = 1 << 44
"""The device's address of page-locked memory is not the host's."""


class StreamHandle:
    """In place of ``torch.cuda.Stream``."""

    numbers = itertools.count(1)

    def __init__(self, engine: "Engine", stream: Stream | None = None):
        self._engine, self._own, self.cuda_stream, self.device = engine, stream is None, next(self.numbers), "cuda:0"
        if self._own:
            engine.call("torch.cuda.Stream()")
        self.work = stream or Stream(engine, f"stream {self.cuda_stream}")
        engine.by_handle[self.cuda_stream] = self.work

    def wait_event(self, event: "Event") -> None:
        _wait(self._engine, self.work, event)

    def wait_stream(self, other: "StreamHandle") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event=None) -> "Event":
        event = event or Event(self._engine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._engine.synchronize([self.work], "Stream.synchronize")

    def query(self) -> bool:
        self._engine.call("Stream.query")
        return not self.work.items

    def __eq__(self, other) -> bool:
        return isinstance(other, StreamHandle) and self.work is other.work

    def __hash__(self) -> int:
        return id(self.work)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        return None

    def __del__(self) -> None:
        if self._own:
            self._engine.freed("a stream")


class Mark:
    """One record of an event."""

    def __init__(self, token):
        self.done, self.token = False, token


class Event:
    """A point in a stream's work; recorded again, it is another point."""

    def __init__(self, engine: "Engine", enable_timing: bool = False, **_):
        self._engine, self.mark, self._timed = engine, None, enable_timing

    def record(self, stream: StreamHandle | None = None) -> None:
        engine = self._engine
        work = stream.work if stream is not None else engine.current_work()
        engine.call("Event.record")
        mark = self.mark = Mark(engine.token())
        engine.log_on(work, ("out", mark.token))
        if work.items or work is not engine.default:
            work.add(lambda: setattr(mark, "done", True), what="records an event")
        else:
            mark.done = True

    def wait(self, stream: StreamHandle | None = None) -> None:
        _wait(self._engine, stream.work if stream is not None else self._engine.current_work(), self)

    def query(self) -> bool:
        self._engine.call("Event.query")
        mark = self.mark
        if mark is not None and mark.done:
            self._engine.log(("in", mark.token))
        return mark is None or mark.done

    def synchronize(self) -> None:
        mark = self.mark
        if mark is not None:
            self._engine.hold("Event.synchronize", [mark.token], lambda: mark.done)

    def elapsed_time(self, other: "Event") -> float:
        for event in (self, other):
            if not event._timed or event.mark is None or not event.mark.done:
                raise RuntimeError("both events must be timed, recorded and completed")
        return 0.0

    def __del__(self) -> None:
        if self.mark is not None:  # torch makes the driver's event when it is recorded first
            self._engine.freed("an event")


def _wait(engine: Engine, work: Stream, event: Event) -> None:
    engine.call("Stream.wait_event")
    mark = event.mark
    if mark is not None:
        engine.log_on(work, ("in", mark.token))
        if not mark.done:
            work.add(lambda: None, lambda: mark.done, what="waits for an event")


class on:
    """In place of ``torch.cuda.stream``, whose result may be entered again, as Megatron does."""

    def __init__(self, engine: Engine, stream: StreamHandle | None):
        engine.call("torch.cuda.stream")
        self._engine, self._stream, self._before = engine, stream, []

    def __enter__(self) -> None:
        self._before.append(getattr(self._engine.here, "stream", None))
        self._engine.here.stream = self._stream or self._before[-1]

    def __exit__(self, *_) -> None:
        self._engine.here.stream = self._before.pop()


def driver(engine: Engine, stream_flags: bool) -> SimpleNamespace:
    """In place of ``cuda.bindings.driver``. ``stream_flags``: what the device says of its streams."""
    ok, invalid = 0, 1

    def word(address: int, stream):
        assert address > OFFSET, "the device was given a host address"
        place = address - OFFSET
        name, pinned = engine.name_of_flag(place), engine.pinned_at(place)
        if pinned is None:
            engine.error(f"a stream is given flag {name}, which is not page-locked")
        else:
            engine.log_on(stream, ("access", f"flag {name}, by a stream", [(pinned, 0, 1, False)]))
        return ctypes.c_int64.from_address(place), name

    def wait(handle, address, value, flags):
        engine.call("cuStreamWaitValue64")
        stream = engine.by_handle[int(handle)]
        memory, name = word(address, stream)
        engine.log_on(stream, ("wait", name, value))
        stream.add(lambda: None, lambda: memory.value >= value, what=f"waits until flag {name} is {value}")
        return (ok,)

    def store(handle, address, value, flags):
        engine.call("cuStreamWriteValue64")
        stream = engine.by_handle[int(handle)]
        memory, name = word(address, stream)
        engine.log_on(stream, ("store", name, value))
        stream.add(lambda: setattr(memory, "value", value), what=f"stores {value} in flag {name}")
        return (ok,)

    return SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=ok),
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=92),
        cuInit=lambda flags: (ok,),
        cuDeviceGetAttribute=lambda attribute, device: (ok, int(stream_flags)),
        cuStreamWaitValue64=wait,
        cuStreamWriteValue64=store,
        cuMemHostGetDevicePointer=lambda address, flags: (
            invalid if engine.pinned_at(address) is None else ok,
            address + OFFSET,
        ),
    )
