"""The engine of the strict stand-in: queues of work, run by a thread in late, early or drawn order.

What a stream does takes as long as its bytes say. The default stream is the exception: what the training thread
computes there is done when it is issued, behind all that was queued before, because its results are wanted. What it
does with host memory is queued as on any other stream, and so are its events and flags. That compute may run later than
what nothing orders behind it is seen by the happens-before check, which does not care when things ran.

Who calls the driver is checked: only the thread that made the engine may, see :meth:`Engine.call`, and a synchronous
call holds the driver's lock, see driver_lock.py.
"""

import contextlib
import itertools
import random
import sys
import threading
import time
import traceback

from driver_lock import DriverLock, stack_text

ONE_QUEUE = "one queue"
"""The order of a device with a single hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), and stricter: nothing begins
before all that any thread has given to any stream before has ended."""

HELD_SECONDS, KERNEL_HELD_SECONDS = 0.004, 0.02
"""In late order work stays so long, unless somebody waits: other ranks have to get on. A kernel on the default stream
stays longer, unless somebody waits for this stream."""

LAUNCHES = 64
"""Pieces of work of one stream behind which the next launch waits for the first; a device's queue is longer (1024)."""

PLACES, NOT = (("/megatron_ext/", "/megatron/", "/examples/"), ("/megatron_ext/cpubench/", "/param_reads.py"))


def frame_here():
    """The innermost frame of the package, Megatron or the example that the calling thread is in, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in PLACES) and not any(part in name for part in NOT):
            return frame
        frame = frame.f_back
    return None


def where() -> str:
    """File and line of :func:`frame_here`."""
    frame = frame_here()
    return "?" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


class Stuck(BaseException):
    """What holds a thread, in words. A device would hold it for ever, whatever the thread catches."""


class Item:
    """A piece of work: ``ready()`` says whether it can begin, ``begin()`` does it or returns a function that says
    whether it has ended; it takes at least ``seconds``. ``accesses``: all that it does, or None where what comes behind
    it must not overtake it."""

    def __init__(self, begin, ready, seconds: float, what: str, accesses):
        self.begin, self.ready, self.seconds, self.what, self.accesses = begin, ready, seconds, what, accesses
        self.born, self.due, self.early, self.ended = time.monotonic(), None, False, None


class Stream:
    """Work in the order in which it was given."""

    def __init__(self, engine: "Engine", name: str):
        self.engine, self.name, self.items = engine, name, []
        engine.streams.append(self)

    def add(self, begin, ready=lambda: True, size: int = 0, seconds: float = 0, what: str = "", accesses=None) -> None:
        if len(self.items) >= LAUNCHES and threading.get_ident() == self.engine.main:
            self.engine.hold_launch(self)
        with self.engine.inside():
            seconds += size / self.engine.bytes_per_second
            self.items.append(Item(begin, ready, seconds, what, accesses))
            self.engine.queue.append(self)
            self.engine.changed.notify_all()


def _meet(some: list[tuple] | None, others: list[tuple]) -> bool:
    """Whether two lists of accesses have bytes in common."""
    return some is None or any(
        key == other and begin < last and first < end for key, begin, end, _ in some for other, first, last, _ in others
    )


class Engine:
    """Runs what streams were given, on a thread. The thread that makes it is the issuer.

    Args:
        order: ``late`` (when somebody waits, or after some milliseconds, so that other ranks get on), ``early``,
            ``drawn``, or :data:`ONE_QUEUE`.
        stuck_seconds: after so long a wait for the device is an error.
        thread_seconds: at most; so long a thread pauses before each thing that it is given to do.
        circle_seconds: after so long without progress a wait that holds the driver's lock while another thread wants it
            is a circle.
        one_issuer: whether device calls of other threads are errors; else all may call, and nobody waits for a lock.

    Attributes:
        misplaced: device calls of threads that are not the issuer.
    """

    def __init__(
        self,
        rank: int,
        seed: int,
        order: str,
        stuck_seconds: float,
        thread_seconds: float = 0.0,
        circle_seconds: float = 3,
        bytes_per_second: float = 1e9,
        one_issuer: bool = True,
    ):
        self.rank, self.order, self._draw, self.stuck_seconds = rank, order, random.Random(seed), stuck_seconds
        self.thread_seconds, self._pauses = thread_seconds, random.Random(seed)
        self.circle_seconds, self.bytes_per_second, self.one_issuer = circle_seconds, bytes_per_second, one_issuer
        self.changed, self.streams, self.by_handle = threading.Condition(), [], {}
        self.used_elsewhere: set[tuple] = set()  # memory of the device that other streams than its own have used
        self.queue: list[Stream] = []  # of what has not ended, in the order in which it was given
        self.entries, self.errors, self.host_waits, self.in_step = [], [], [], False
        self.misplaced, self.stacks, self.lock = [], [], DriverLock()
        self._stack_numbers: dict[str, int] = {}
        self._tokens, self.here, self._waiting, self.closed = itertools.count(), threading.local(), 0, False
        self._draining, self._launched = 0, set()
        self._names: dict[str, int] = {}
        self.main, self.name_of_flag = threading.get_ident(), lambda address: (rank, address)
        self.pinned_at = lambda address: ("pinned", rank)
        self.default = Stream(self, "default stream")
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """On a thread that has been given something to do."""
        if self.thread_seconds:
            time.sleep(self._pauses.random() ** 8 * self.thread_seconds)  # mostly short, seldom long

    # What was asked for, for the happens-before check.

    def token(self):
        return self.rank, next(self._tokens)

    def thread(self) -> tuple:
        """The timeline of the calling thread."""
        found = getattr(self.here, "timeline", None)
        if found is None:
            name, me = threading.current_thread().name, threading.get_ident()
            if self._names.setdefault(name, me) != me:
                name = f"{name} {me}"
            found = self.here.timeline = (self.rank, f"thread {name}")
        return found

    def log(self, *entries: tuple) -> None:
        """``entries`` of the calling thread."""
        timeline = self.thread()
        self.entries.extend((timeline, *entry) for entry in entries)

    def log_on(self, stream, *entries: tuple) -> None:
        """``entries`` that the calling thread gives to ``stream``, a stream or a name."""
        name = getattr(stream, "name", stream)
        for key in (place[0] for kind, *rest in entries if kind == "access" for place in rest[1]):
            if key[1] == "memory" and key[3] not in (None, name):
                self.used_elsewhere.add(key)
        self.entries.append((self.thread(), "issue", (self.rank, name), *entries))

    def error(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)

    def _stack(self) -> int:
        """Number of the calling thread's stack in :attr:`stacks`."""
        text = stack_text(sys._getframe(2))
        if text not in self._stack_numbers:
            self._stack_numbers[text] = len(self.stacks)
            self.stacks.append(text)
        return self._stack_numbers[text]

    # Calls of the driver.

    def call(self, what: str, waits: bool = True) -> None:
        """The calling thread calls the driver. ``waits``: until no other thread has the driver's lock."""
        if threading.get_ident() != self.main and self.one_issuer and not self.closed:
            label = what if " at " in what else f"{what} at {where()}"
            text = f"{label}, by {self.thread()[1]}: only the issuer may call the driver"
            if text not in self.misplaced:
                self.misplaced.append(text)
            self.log(("call", label, self._stack()))
        if waits and self.one_issuer:
            self.lock.pass_through(what)

    def freed(self, what: str) -> None:
        """Something that the driver knows dies on the calling thread."""
        if not (self.closed or sys.is_finalizing() or threading.current_thread() is self._thread):
            self.call(f"freeing {what}", waits=not getattr(self.here, "inside", 0))

    def hold(
        self, what: str, tokens: list, done, keeps_interpreter: bool = False, joins: bool = True, missing=None
    ) -> None:
        """A call that holds the driver's lock until ``done()``, what is behind ``tokens``; ``missing``: see
        :meth:`until`."""
        label = f"{what} at {where()}"
        self.call(what)
        if threading.get_ident() == self.main and self.in_step and joins:
            frame = frame_here()
            if frame is not None and "/megatron_ext/" in frame.f_code.co_filename:
                self.host_waits.append(label)
        self._hold(label, done, missing)
        if joins or self.one_issuer:
            self.log(("sync", tokens, label, self._stack(), keeps_interpreter, joins))

    def hold_launch(self, stream: Stream) -> None:
        """A launch holds the driver's lock while the queue of ``stream`` is full."""
        self._hold(f"a launch at {where()}", lambda: len(stream.items) < LAUNCHES)

    def _hold(self, label: str, done, missing=None) -> None:
        with self.lock.held(label) if self.one_issuer else contextlib.nullcontext():
            self._draining += 1
            try:
                self.until(done, missing)
            finally:
                self._draining -= 1

    def synchronize(self, streams: list[Stream] | None, what: str, keeps_interpreter: bool = False) -> None:
        """Block until ``streams`` have done what they were given; None: all."""
        streams = list(self.streams) if streams is None else streams
        done = lambda: not any(stream.items for stream in streams)
        self.hold(what, self.ends(streams), done, keeps_interpreter)

    def might_synchronize(self, what: str, keeps_interpreter: bool = False) -> None:
        """A call that may wait for the whole device, and orders nothing."""
        self.hold(what, self.ends(list(self.streams)), lambda: True, keeps_interpreter, joins=False)

    def launched(self, kernel: str, dtype: str) -> None:
        """A kernel is loaded when it is first launched; there is one for each dtype."""
        if (kernel, dtype) not in self._launched:
            self._launched.add((kernel, dtype))
            self.might_synchronize(f"the first launch of {kernel}, {dtype}")

    def ends(self, streams: list[Stream]) -> list:
        tokens = [self.token() for _ in streams]
        for stream, token in zip(streams, tokens):
            self.log_on(stream, ("out", token))
        return tokens

    # Streams.

    def current_work(self) -> Stream:
        """The calling thread's stream."""
        handle = getattr(self.here, "stream", None)
        return self.default if handle is None else handle.work

    @contextlib.contextmanager
    def inside(self):
        """With :attr:`changed`; what dies meanwhile on this thread does not wait for the driver."""
        self.here.inside = getattr(self.here, "inside", 0) + 1
        try:
            with self.changed:
                yield
        finally:
            self.here.inside -= 1

    def until(self, done, missing=None) -> None:
        """Block until ``done()``; meanwhile late work gets on. ``missing()`` says what holds this thread:
        :class:`Stuck`."""
        since = begin = time.monotonic()
        seen = None
        with self.inside():
            self._waiting += 1
            self.changed.notify_all()
            try:
                while not done():
                    self.changed.wait(0.001)
                    now, state = time.monotonic(), (len(self.entries), len(self.queue))
                    if state != seen:
                        since, seen = now, state
                    if now - since > self.circle_seconds:
                        self.lock.report_circle(self._heads())
                    if now - begin > self.stuck_seconds:
                        if missing is not None:
                            raise Stuck(missing())
                        raise RuntimeError(f"the device does not get on: {self._heads()}")
            finally:
                self._waiting -= 1

    def _heads(self) -> list[str]:
        return [f"{stream.name} {stream.items[0].what}" for stream in self.streams if stream.items]

    def drain(self, accesses: list[tuple] | None = None) -> None:
        """Block until compute on the default stream can be done. It overtakes kernels that are queued there and touch
        none of its bytes: nobody could tell, and the thread goes on while they wait."""
        if self.order == ONE_QUEUE and self.queue:
            self.until(lambda: not self.queue)
        elif self.default.items and (accesses is None or any(_meet(i.accesses, accesses) for i in self.default.items)):
            # The thread would go on to its next synchronous call, and wait there.
            self._hold(f"the next synchronous call behind {where()}", lambda: not self.default.items)

    def _run(self) -> None:
        while not self.closed:
            with self.changed:
                heads = self.queue[:1] if self.order == ONE_QUEUE else self.streams
                heads = [stream for stream in heads if stream.items and self._may_move(stream, stream.items[0])]
                if not heads:
                    self.changed.wait(0.0003 if self.queue else 0.05)  # what is added is told, what gets ready is not
                    continue
                stream = self._draw.choice(heads)
                item = stream.items[0]
            if item.ended is None:
                try:
                    item.ended = item.begin() or (lambda: True)
                except BaseException as error:
                    self.errors.append("".join(traceback.format_exception(error)[-3:]))
                    item.ended = lambda: True
            with self.changed:
                if time.monotonic() >= item.due and item.ended():
                    stream.items.pop(0)
                    item.begin = item.ended = None  # whoever waits for it finds what it used dropped
                    self.queue.remove(stream)
                    self.changed.notify_all()
            if self.order == "drawn" and self._draw.random() < 0.2:
                time.sleep(self._draw.random() * 0.001)

    def _may_move(self, stream: Stream, item: Item) -> bool:
        """Whether it has begun, or has ended; what it does with memory is done as it begins where that is early."""
        now = time.monotonic()
        if item.due is None:
            kernel = item.accesses is not None and stream is self.default
            awaited = self._draining if kernel else self._waiting
            seconds = KERNEL_HELD_SECONDS if kernel else HELD_SECONDS
            held = self.order == "late" and not awaited and now - item.born < seconds
            if held or not item.ready():
                return False
            item.due = now + item.seconds
            item.early = self.order == "early" or (self.order == "drawn" and self._draw.random() < 0.5)
        if item.ended is None:
            return item.early or now >= item.due
        return now >= item.due and item.ended()

    def close(self) -> None:
        self.closed = True
        self._thread.join()
