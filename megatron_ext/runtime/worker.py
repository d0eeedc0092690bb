"""A thread that does, in order, what needs the processor and no device: begin reads of a drive, network, host memory.

Reads end on threads of their own (drive.py); errors of both end the run (watch.py). No such thread calls the
device's driver, nor holds what the driver knows: see [Note: One issuer] in streams.py.
"""

import atexit
import multiprocessing
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

CLOSE_SECONDS = 60
"""Seconds that closing waits for transfers in flight: longer than any that still makes progress."""

_alive: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_exiting = threading.Event()


class Exiting(RuntimeError):
    """Raised in place of waiting where the process is about to end."""


def exiting() -> bool:
    """Whether the interpreter is about to end; polling stops then."""
    return _exiting.is_set()


def begin_exit() -> None:
    """This process is about to end and says why: its threads stop waiting for other ranks, and say nothing more."""
    _exiting.set()


def leave(code: int) -> NoReturn:
    """End this process at once, and what it has started: workers of a data loader would outlive it, and hold what it
    writes to."""
    try:
        for child in multiprocessing.active_children():
            child.kill()
    finally:  # whatever another thread does with them
        os._exit(code)


on_failure: Callable[[BaseException], None] | None = None
"""Called when a background thread fails, to end the run; set by :class:`megatron_ext.runtime.watch.Watch`."""


def tell_watch(error: BaseException) -> None:
    """Tell the watch, where one runs, that a background thread has failed. It ends the run."""
    if on_failure is not None and not isinstance(error, Exiting):
        on_failure(error)


def report_failure(error: BaseException) -> None:
    """As :func:`tell_watch`, for an error that no caller gets: it is printed where no watch runs."""
    if on_failure is None and not isinstance(error, Exiting):
        traceback.print_exception(error, file=sys.stderr)
    tell_watch(error)


def guarded(function: Callable) -> Callable:
    """``function`` for a background thread: what it raises is reported, because no caller could catch it."""

    def run(*arguments) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            report_failure(error)

    return run


@atexit.register
def _end_threads() -> None:
    """A thread that the interpreter ends inside a copy of torch's aborts the process, and with it the
    exit code and the error that was to be seen."""
    _exiting.set()
    for worker in list(_alive):
        worker._queue.put(None)
    for worker in list(_alive):
        worker._thread.join(timeout=2)


class Waitable(Protocol):
    """A handle: on a device the current stream waits, not the host."""

    def wait(self) -> object: ...


class Transfer:
    """Handle of what a thread does; ``wait`` returns when it is done and raises what it raised.

    The issuing thread waits by :meth:`Issuer.join` instead: the thread may wait for what it has still to issue.
    """

    __slots__ = ("_done", "ended", "error")

    def __init__(self) -> None:
        # A lock that is held until the transfer is done: an Event costs the training thread ten times
        # as much to make.
        self._done = threading.Lock()
        self._done.acquire()
        self.ended = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        with self._done:
            pass
        if self.error is not None:
            raise self.error

    def check(self) -> None:
        """Raise what it raised; it has ended."""
        assert self.ended
        if self.error is not None:
            raise self.error

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the transfer as done, or as failed with ``error``; only the first call counts."""
        if self.ended:
            return
        self.error = error
        self.ended = True  # behind the error: pollers look at it first
        self._done.release()


LATER = object()
"""Returned by a function that only began its transfer: it calls ``transfer.finish`` itself."""


class _WorkerThread(threading.Thread):
    """Of a :class:`Worker`."""


def on_worker() -> bool:
    """Whether the calling thread is one of a :class:`Worker`, and not the issuing one."""
    return isinstance(threading.current_thread(), _WorkerThread)


class Worker:
    """FIFO of ``(function, transfer)``; after a failure every later transfer fails too, and a run that is watched
    ends."""

    def __init__(self, name: str):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = _WorkerThread(target=guarded(self._run), name=f"megatron_ext-{name}", daemon=True)
        self._thread.start()
        _alive.add(self)

    def submit(self, function) -> Transfer:
        """Run ``function(transfer)`` on the thread, after everything submitted before."""
        transfer = Transfer()
        self._queue.put((function, transfer))
        return transfer

    def _run(self) -> None:
        failure: BaseException | None = None
        while True:
            item = self._queue.get()
            if item is None:
                return
            function, transfer = item
            if failure is None and _exiting.is_set():
                failure = Exiting("the process is about to end")
            if failure is None:
                try:
                    if function(transfer) is LATER:
                        continue
                except BaseException as error:  # handed to whoever waits
                    failure = error
            transfer.finish(failure)
            if failure is not None:
                tell_watch(failure)

    def close(self) -> None:
        """End the thread after what is queued.

        Raises:
            RuntimeError: it does not end; what it writes to or reads from must stay.
        """
        self._queue.put(None)
        self._thread.join(timeout=CLOSE_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread {self._thread.name} still waits after {CLOSE_SECONDS} s")
