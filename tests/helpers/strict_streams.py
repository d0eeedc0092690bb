"""Streams, events and flags of the strict stand-in: real queues, run by a thread in late, early or drawn order.

The default stream is the exception: what the training thread computes is done as it is issued, in its order. A copy
therefore never runs before compute that was issued earlier; that nothing orders the two is seen by the happens-before
check, which does not care when things ran.
"""

import ctypes
import itertools
import random
import threading
import time
from types import SimpleNamespace

ONE_QUEUE = "one queue"
"""The order of a device with a single hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), and stricter: nothing begins
before all that any thread has given to any stream before has ended."""

OFFSET = 1 << 44
"""The device's address of page-locked memory is not the host's."""


class Mark:
    """One record of an event."""

    def __init__(self, token):
        self.done, self.token = False, token


class Item:
    """A piece of work: ``ready()`` says whether it can begin, ``begin()`` does it or returns a function that says
    whether it has ended."""

    def __init__(self, begin, ready=lambda: True):
        self.begin, self.ready, self.ended, self.born = begin, ready, None, time.monotonic()


class Stream:
    """Work in the order in which it was given."""

    numbers = itertools.count(1)

    def __init__(self, engine: "Engine", name: str | None = None):
        self.engine, self.cuda_stream, self.items, self.device = engine, next(Stream.numbers), [], "cuda:0"
        self.name = name or f"stream {self.cuda_stream}"
        engine.by_handle[self.cuda_stream] = self
        engine.streams.append(self)

    def add(self, begin, ready=lambda: True) -> None:
        with self.engine.changed:
            self.items.append(Item(begin, ready))
            self.engine.queue.append(self)
            self.engine.changed.notify_all()

    def wait_event(self, event: "Event") -> None:
        mark = event.mark
        if mark is None:
            return
        self.engine.log_on(self, ("in", mark.token))
        if self is self.engine.default:
            self.engine.until(lambda: mark.done)
        else:
            self.add(lambda: None, lambda: mark.done)

    def wait_stream(self, other: "Stream") -> None:
        event = Event(self.engine)
        event.record(other)
        self.wait_event(event)

    def record_event(self, event=None) -> "Event":
        event = event or Event(self.engine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return not self.items

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        return None


class Event:
    """A point in a stream's work; recorded again, it is another point."""

    def __init__(self, engine: "Engine", **_):
        self.engine, self.mark = engine, None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.engine.current()
        mark = self.mark = Mark(self.engine.token())
        self.engine.log_on(stream, ("out", mark.token))
        if stream is self.engine.default:
            mark.done = True
        else:
            stream.add(lambda: setattr(mark, "done", True))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.engine.current()).wait_event(self)

    def query(self) -> bool:
        return self.mark is None or self.mark.done

    def synchronize(self) -> None:
        mark = self.mark
        if mark is not None:
            self.engine.host_wait("Event.synchronize")
            self.engine.until(lambda: mark.done)
            self.engine.log(("in", mark.token))

    def elapsed_time(self, other) -> float:
        return 0.0


class Engine:
    """Runs what streams were given, on a thread.

    Args:
        order: ``late`` (when somebody waits, or after some milliseconds, so that other ranks get on), ``early``,
            ``drawn``, or :data:`ONE_QUEUE`.
    """

    def __init__(self, rank: int, seed: int, order: str, stuck_seconds: float):
        self.rank, self.order, self._draw, self.stuck_seconds = rank, order, random.Random(seed), stuck_seconds
        self.changed, self.streams, self.by_handle = threading.Condition(threading.RLock()), [], {}
        self.queue: list[Stream] = []  # of what has not ended, in the order in which it was given
        self.entries, self.errors, self.host_waits, self.in_step = [], [], [], False
        self._tokens, self.here, self._waiting, self._closed = itertools.count(), threading.local(), 0, False
        self.main = threading.current_thread()
        self.default = Stream(self, "default stream")
        self.flag_names: dict[int, object] = {}  # of flags that ranks share, by this rank's address
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    # What was asked for, for the happens-before check.

    def token(self):
        return self.rank, next(self._tokens)

    def thread(self) -> tuple:
        return self.rank, f"thread {threading.current_thread().name}"

    def log(self, *entries: tuple) -> None:
        """``entries`` of the calling thread."""
        timeline = self.thread()
        self.entries.extend((timeline, *entry) for entry in entries)

    def log_on(self, stream, *entries: tuple) -> None:
        """``entries`` that the calling thread gives to ``stream``, a stream or a name."""
        self.entries.append((self.thread(), "issue", (self.rank, getattr(stream, "name", stream)), *entries))

    def host_wait(self, what: str) -> None:
        if self.in_step and threading.current_thread() is self.main:
            self.host_waits.append(what)

    def flag(self, address: int):
        return self.flag_names.get(address, (self.rank, address))

    # Streams.

    def current(self) -> Stream:
        return getattr(self.here, "stream", None) or self.default

    def on(self, stream):
        engine = self

        class On:
            def __enter__(self):
                self.before = getattr(engine.here, "stream", None)
                engine.here.stream = stream

            def __exit__(self, *_):
                engine.here.stream = self.before

        return On()

    def until(self, done) -> None:
        """Block until ``done()``; meanwhile late work gets on."""
        deadline = time.monotonic() + self.stuck_seconds
        with self.changed:
            self._waiting += 1
            self.changed.notify_all()
            try:
                while not done():
                    self.changed.wait(0.001)
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the device does not get on: {[len(s.items) for s in self.streams]} items")
            finally:
                self._waiting -= 1

    def behind_all(self) -> None:
        """Block, before work of the default stream, until it is its turn in a single queue."""
        if self.order == ONE_QUEUE and self.queue:
            self.until(lambda: not self.queue)

    def _run(self) -> None:
        while not self._closed:
            with self.changed:
                heads = self.queue[:1] if self.order == ONE_QUEUE else self.streams
                heads = [stream for stream in heads if stream.items and self._may_run(stream.items[0])]
                if not heads:
                    self.changed.wait(0.0003)
                    continue
                stream = self._draw.choice(heads)
                item = stream.items[0]
            if item.ended is None:
                try:
                    item.ended = item.begin() or (lambda: True)
                except BaseException as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    item.ended = lambda: True
            with self.changed:
                if item.ended():
                    stream.items.pop(0)
                    self.queue.remove(stream)
                    self.changed.notify_all()
            if self.order == "drawn" and self._draw.random() < 0.2:
                time.sleep(self._draw.random() * 0.001)

    def _may_run(self, item: Item) -> bool:
        if item.ended is not None:
            return item.ended()
        held = self.order == "late" and not self._waiting and time.monotonic() - item.born < 0.004
        return not held and item.ready()

    def synchronize(self) -> None:
        """Block until every stream has done what it was given."""
        self.host_wait("torch.cuda.synchronize")
        self.until(lambda: not any(stream.items for stream in self.streams))
        for stream in list(self.streams):
            token = self.token()
            self.log_on(stream, ("out", token))
            self.log(("in", token))

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    def driver(self) -> SimpleNamespace:
        """In place of ``cuda.bindings.driver``."""
        ok, engine = 0, self

        def host(address: int) -> int:
            assert address > OFFSET, "the device was given a host address"
            return address - OFFSET

        def wait(handle, address, value, flags):
            stream, place = engine.by_handle[handle], host(address)
            word = ctypes.c_int64.from_address(place)
            engine.log_on(stream, ("wait", engine.flag(place), value))
            if stream is engine.default:
                engine.until(lambda: word.value >= value)
            else:
                stream.add(lambda: None, lambda: word.value >= value)
            return (ok,)

        def store(handle, address, value, flags):
            stream, place = engine.by_handle[handle], host(address)
            word = ctypes.c_int64.from_address(place)
            engine.log_on(stream, ("store", engine.flag(place), value))
            if stream is engine.default:
                engine.behind_all()
                word.value = value
            else:
                stream.add(lambda: setattr(word, "value", value))
            return (ok,)

        return SimpleNamespace(
            CUresult=SimpleNamespace(CUDA_SUCCESS=ok),
            cuStreamWaitValue64=wait,
            cuStreamWriteValue64=store,
            cuMemHostGetDevicePointer=lambda address, flags: (ok, address + OFFSET),
        )
