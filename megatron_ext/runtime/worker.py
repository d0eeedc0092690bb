"""A thread that runs, in order, work that needs the CPU and no device: begin reads of a drive, network, host memory.

Reads end on other threads (drive.py). A failure of either kind of thread ends the run (watch.py). No such thread calls
the device's driver or holds driver objects: see [Note: One issuer] in streams.py.
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
    """Raised instead of waiting when the process is about to end."""


def exiting() -> bool:
    """Whether the interpreter is about to end; polling stops then."""
    return _exiting.is_set()


def begin_exit() -> None:
    """This process is about to end and reports why. Its threads stop waiting for other ranks, and report no more."""
    _exiting.set()


def leave(code: int) -> NoReturn:
    """End this process and its children at once: data loader workers would outlive it, and keep the files open that it
    writes to."""
    try:
        for child in multiprocessing.active_children():
            child.kill()
    finally:  # even if another thread changes the list of children
        os._exit(code)


on_failure: Callable[[BaseException], None] | None = None
"""Called when a background thread fails, to end the run; set by :class:`megatron_ext.runtime.watch.Watch`."""


def tell_watch(error: BaseException) -> None:
    """Tell the watch, if one runs, that a background thread has failed. The watch ends the run."""
    if on_failure is not None and not isinstance(error, Exiting):
        on_failure(error)


def guarded(function: Callable) -> Callable:
    """Wrap ``function`` for a background thread: its errors are told to the watch, because no caller could catch them;
    if no watch runs, they are printed."""

    def run(*arguments) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            if on_failure is None and not isinstance(error, Exiting):
                traceback.print_exception(error, file=sys.stderr)
            tell_watch(error)

    return run


@atexit.register
def _end_threads() -> None:
    """End the threads. If the interpreter ended a thread inside a copy of torch, the process would abort
    and lose the exit code and the error."""
    _exiting.set()
    for worker in list(_alive):
        worker._queue.put(None)
    for worker in list(_alive):
        worker._thread.join(timeout=2)


class Waitable(Protocol):
    """A handle. On a device, ``wait`` makes the current stream wait, not the host."""

    def wait(self) -> object: ...


class Transfer:
    """Handle of work on a thread; ``wait`` returns when the work is done and raises its error.

    The issuing thread waits with :meth:`Issuer.join` instead, because the thread may wait for work that it has to
    issue.
    """

    __slots__ = ("_done", "ended", "error")

    def __init__(self) -> None:
        # A lock that is held until the transfer is done: making an Event would cost the training thread ten times
        # as much.
        self._done = threading.Lock()
        self._done.acquire()
        self.ended = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        with self._done:
            self.check()

    def check(self) -> None:
        """Raise the error of the transfer, if any; the transfer has ended."""
        assert self.ended
        if self.error is not None:
            raise self.error

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the transfer as done, or as failed with ``error``; only the first call counts."""
        if self.ended:
            return
        self.error = error
        self.ended = True  # set after the error, because pollers read ``ended`` first
        self._done.release()


LATER = object()
"""Returned by a function that only began its transfer; it calls ``transfer.finish`` later."""


class _WorkerThread(threading.Thread):
    """The thread of a :class:`Worker`."""


def on_worker() -> bool:
    """Whether the calling thread belongs to a :class:`Worker`."""
    return isinstance(threading.current_thread(), _WorkerThread)


class Worker:
    """FIFO queue of ``(function, transfer)``. After a failure every later transfer fails too, and a run with a watch
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
                except BaseException as error:  # raised by the waiters of the transfer
                    failure = error
            transfer.finish(failure)
            if failure is not None:
                tell_watch(failure)

    def close(self) -> None:
        """End the thread after the queued work.

        Raises:
            RuntimeError: the thread does not end; the memory that it uses must stay.
        """
        self._queue.put(None)
        self._thread.join(timeout=CLOSE_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread {self._thread.name} still waits after {CLOSE_SECONDS} s")
