"""Independent parts of planning, divided among processors.

Each part is a pure function of its inputs, so results do not depend on the number of processors.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_ext.formats.end_with_parent import end_with_parent
from megatron_ext.formats.errors import InputError

T = TypeVar("T")

WORTH = 100_000
"""With at least this many steps and gathers to simulate in all tasks, forking processes takes little in comparison."""

MOST_PROCESSES = 8
"""With more processes, forking takes longer than what they save. A container may also have fewer processors than are
seen here."""


def in_processes(tasks: Sequence[Callable[[], T]], simulated: int) -> list[T | InputError]:
    """The results of ``tasks`` in their order. An InputError that a task raises is its result.

    This process runs a part of the tasks, and forked processes run the others. Nothing is forked if there is little to
    do, outside of Linux, in a forked process, or if this process has several Python threads: a lock that one of them
    holds would stay locked in a forked process. Tasks must not use torch, whose threads do not survive a fork. If a
    process cannot be forked, or if it is killed, this process runs its tasks.

    Args:
        simulated: about how many steps and gathers the tasks simulate.
    """
    if simulated < WORTH or threading.active_count() > 1 or sys.platform != "linux":
        return _run(tasks)
    import multiprocessing  # takes 25 ms, which every command would

    if multiprocessing.current_process().daemon:
        return _run(tasks)
    workers = max(min(len(os.sched_getaffinity(0)), len(tasks), MOST_PROCESSES), 1)
    parts, forked = [tasks[number::workers] for number in range(workers)], []
    try:
        with contextlib.suppress(OSError):  # too many processes, or too little memory
            for part in parts[1:]:
                forked.append(_forked(multiprocessing.get_context("fork"), part))
        results = [_run(parts[0])]
        for part, (process, receiver) in zip(parts[1:], forked):
            try:
                results.append(receiver.recv())
            except (EOFError, OSError):
                results.append(_run(part))
                process.join()
                assert process.exitcode and process.exitcode < 0, "only a signal ends a forked process early"
        results += map(_run, parts[1 + len(forked) :])
    finally:
        for process, receiver in forked:
            receiver.close()
            process.kill()
            process.join()
    return [results[number % workers][number // workers] for number in range(len(tasks))]


def _forked(fork, tasks: Sequence[Callable[[], T]]):
    """A forked process that runs ``tasks``, and the connection by which it sends their results."""
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run_and_send, args=(tasks, sender.send, os.getpid()), daemon=True)
    process.start()
    sender.close()  # so that recv() ends if the process is killed
    return process, receiver


def _run_and_send(tasks: Sequence[Callable[[], T]], send: Callable[[list], None], parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that forked this one, which ends this one
    send(_run(tasks))


def _run(tasks: Sequence[Callable[[], T]]) -> list[T | InputError]:
    results: list[T | InputError] = []
    for task in tasks:
        try:
            results.append(task())
        except InputError as error:
            results.append(error)
    return results
