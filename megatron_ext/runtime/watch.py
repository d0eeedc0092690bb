"""Ends a run that cannot go on: a background thread has failed, or steps do not end any more.

[Note: Who hears of a failure]
The error of a background thread is raised where its transfers are waited for. The training thread may never get there.
It may be in a collective with a rank that waits, through other ranks, for the failed thread, and a collective cannot be
aborted from Python. So the process ends by itself, :data:`GRACE_SECONDS` after the failure. That closes its
connections: ranks that wait for it get an error, and the launcher ends all others. A stream that waits for a flag gets
no error, so the watch of each rank also looks for ranks that can no longer publish.

[Note: Who is to blame]
A rank that ends because another one has ended exits with the code :data:`PEER_LOST_CODE`, so that a launcher can
tell it from the rank that ended first.
"""

import sys
import threading
import time
import traceback
from collections import Counter
from types import FrameType

from megatron_ext.launch.launcher import PEER_LOST_CODE
from megatron_ext.runtime import worker
from megatron_ext.runtime.drive import DriveError
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.host_pool import COPY, PeerLost

GRACE_SECONDS = 0.2
"""Seconds that the training thread has, after a background thread has failed, to end the process with its own error."""

LOOK_SECONDS = 1.0
"""Seconds between two checks whether a step has ended."""

OTHERS_SECONDS = 2.0
"""Seconds that a stalled rank stays alive after its message, so that the other ranks can print theirs."""

DEFAULT_STEP_SECONDS = 540.0
"""Less than the 10 minutes after which Megatron's process groups time out, with a message that names no group."""

FRAMES = 6
"""Frames of each thread that are printed, the innermost first."""

CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")
"""Parts of the text of a collective's error when a peer has ended."""


def lost_peer(error: BaseException) -> bool:
    """Whether ``error`` says that another rank has ended, rather than what is wrong with this one. No OSError does:
    torch's errors are RuntimeErrors, and a connection of the script may be refused, too."""
    return isinstance(error, PeerLost) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in CLOSED)
    )


def exit_code(error: BaseException) -> int:
    """Exit code of a process that ``error`` ends, see [Note: Who is to blame]."""
    return PEER_LOST_CODE if lost_peer(error) else 1


class Watch:
    """Watches one rank, on its own thread; one instance per process. It starts before the other threads do.

    Args:
        step_seconds: if no step ends for so long while an iteration runs, the process ends; 0: never.

    Attributes:
        executor: the executor whose steps are watched; None during preparation.
    """

    def __init__(self, rank: int, step_seconds: float = DEFAULT_STEP_SECONDS):
        self.rank, self.step_seconds = rank, step_seconds
        self.executor: Executor | None = None
        self._failure: BaseException | None = None
        self._failed_in = ""
        self._closed, self._wake = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron_ext-watch", daemon=True)
        worker.on_failure = self._on_failure
        self._thread.start()

    def _on_failure(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure, self._failed_in = error, threading.current_thread().name
        self._wake.set()

    def _run(self) -> None:
        try:
            self._look()
        except BaseException as error:  # nothing else would watch any more
            self._end(error, "megatron_ext-watch")

    def _look(self) -> None:
        seen, waited = None, 0.0
        while not self._closed:
            self._wake.wait(LOOK_SECONDS)
            if worker.exiting():
                return
            if self._failure is not None:
                time.sleep(GRACE_SECONDS)
                self._end(self._failure, self._failed_in)
            executor = self.executor
            if executor is not None and executor.pool is not None:
                executor.pool.check_peers(executor.clock.version)
            progress = executor.progress() if executor is not None else None
            # Counted in looks, not by the clock: a process that was stopped and continued has not waited.
            waited = waited + LOOK_SECONDS if progress is not None and progress == seen else 0.0
            seen = progress
            if self.step_seconds and waited >= self.step_seconds:
                self._end_stalled()

    def _end(self, error: BaseException, thread: str) -> None:
        lines = [] if isinstance(error, DriveError) or lost_peer(error) else traceback.format_exception(error)
        said = f"{''.join(lines)}megatron-ext: rank {self.rank}: the thread {thread} failed, so the run ends: "
        print(f"{said}{type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        worker.leave(exit_code(error))

    def _end_stalled(self) -> None:
        text = f"megatron-ext: rank {self.rank}: no step has ended for {self.step_seconds:g} s, so the run ends "
        text += "(--user-defined-schedule-step-timeout)"
        groups = state_of(self.executor) if self.executor is not None else []
        print("\n  ".join([text, *groups, *state_of_threads()]), file=sys.__stderr__, flush=True)
        time.sleep(OTHERS_SECONDS)
        worker.leave(1)

    def close(self) -> None:
        """End the watch after training. Raises RuntimeError if a background thread has failed meanwhile."""
        worker.on_failure = None
        if self._failure is not None:
            raise RuntimeError(f"the thread {self._failed_in} failed") from self._failure
        self._closed = True
        self._wake.set()
        self._thread.join()


def state_of(executor: Executor) -> list[str]:
    """State of a rank: its step, and every group with its state and published versions; one line each."""
    lines = [executor.where()]
    for group in executor.groups.values():
        line = f"{group}: {group.state.value}, version {group.version} of {executor.clock.version}"
        if executor.pool is not None and (group.index, COPY) in executor.pool.flags:
            line += f"; published at versions {executor.pool.published(group)}, by rank of the node"
        lines.append(line)
    return lines


def state_of_threads() -> list[str]:
    """Stack of every thread, innermost frame first; threads with the same stack, such as block movers, share a line."""
    frames, known = sys._current_frames(), threading.enumerate()
    said = Counter(f"thread {one.name}: {_stack(frames[one.ident])}" for one in known if one.ident in frames)
    return [line if number == 1 else f"{number} x {line}" for line, number in said.items()]


def _stack(frame: FrameType) -> str:
    found = reversed(traceback.extract_stack(frame, limit=None)[-FRAMES:])
    return ", called by ".join(f"{entry.name} ({entry.filename}:{entry.lineno})" for entry in found)
