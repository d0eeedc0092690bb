"""A thread that runs transfers of one link in issue order.

On CPU the copy itself happens here (torch releases the interpreter while it copies), so that
copies overlap compute as they do on a device's copy engine. On CUDA the thread only waits
until a copy may be issued, then issues it on its stream.
"""

import atexit
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Protocol

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
    """An event of a stream: the current stream waits for it."""

    def wait(self) -> object: ...


class Transfer:
    """Handle of one transfer; ``wait`` returns when it is done and raises what it raised.

    On CUDA a transfer is done when its copy is on the stream; ``wait`` then makes the current stream wait for the
    copy's end. Until the copy is issued ``wait`` blocks the host, because the worker first waits for the flags of the
    other ranks: after an optimizer step the training thread waits until the group is published, and cannot queue later
    kernels in that time. So transfers are on streams where the device allows it, see stream_flags.py.
    """

    __slots__ = ("_done", "ended", "error", "after")

    def __init__(self) -> None:
        # A lock that is held until the transfer is done: an Event costs the training thread ten times
        # as much to make.
        self._done = threading.Lock()
        self._done.acquire()
        self.ended = False
        self.error: BaseException | None = None
        self.after: Waitable | None = None  # CUDA: event that the compute stream must wait for

    def wait(self) -> None:
        with self._done:
            pass
        if self.error is not None:
            raise self.error
        if self.after is not None:
            self.after.wait()

    def finished(self, device) -> None:
        """Block the calling thread until the bytes have moved, on the device as well."""
        with self._done:
            pass
        if self.error is not None:
            raise self.error
        device.synchronize(self.after)

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the transfer as done, or as failed with ``error``; only the first call counts."""
        if self.ended:
            return
        self.ended, self.error = True, error
        self._done.release()


LATER = object()
"""Returned by a function that only began its transfer: it calls ``transfer.finish`` itself."""


class Worker:
    """FIFO of ``(function, transfer)``; after a failure every later transfer fails too, and a run that is watched
    ends."""

    def __init__(self, name: str):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=guarded(self._run), name=f"megatron_ext-{name}", daemon=True)
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
