"""Ranks that are forks of the launcher, which has imported the modules that all of them need.

Importing torch and megatron-core takes 4 s of processor time: four ranks on two processors took 10 s to start. In a
forked rank the modules are already imported; it then runs the script as ``python SCRIPT`` would.

This works only on the CPU, because CUDA does not survive a fork, and only for scripts whose import starts no thread.
"""

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_ext.cpubench import allocator


def restart_with(environment: dict[str, str]) -> None:
    """Start this program again if ``environment`` has a variable that is not set, because the C library and OpenMP read
    their variables once, before Python runs. In this case the call does not return."""
    missing = {name: value for name, value in environment.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


def import_for_forks(module: str) -> None:
    """Import ``module`` and what training imports later. Garbage collections in forks skip these objects."""
    importlib.import_module(module)
    if "megatron.core" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")  # takes half a second, when the first optimizer is made
    gc.freeze()


def import_script(script: str) -> bool:
    """Import ``script`` as a module, so that the modules that it imports are loaded.

    Returns:
        Whether ranks can be forked: not on a machine with a CUDA device, and not if the script cannot be imported or
        has started a thread. Every rank then starts as a process of its own and reports what is wrong.
    """
    if not allocator.rank_variables():
        return False
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        import_for_forks(Path(script).stem)
    except BaseException:  # including SystemExit: the ranks then end as they would without this import
        return False
    return threading.active_count() == 1


class ForkedRank:
    """One forked rank, with those methods of :class:`subprocess.Popen` that the launcher uses.

    Args:
        script: path of the script; its directory is the first on ``sys.path``.
        arguments: arguments of the script.
        environment: variables of this rank in addition to those of this process.
        begin: called first in the rank.
    """

    def __init__(self, script: str, arguments: list[str], environment: dict[str, str], begin: Callable[[], None]):
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(script, arguments, environment, begin)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the rank runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the rank and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the rank still runs after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(sys.argv, timeout or 0.0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run(script: str, arguments: list[str], environment: dict[str, str], begin: Callable[[], None]) -> None:
    """In the rank: run the script and end the process without returning to the launcher's code."""

    def program() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        begin()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environment)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    run_and_leave(program)


def run_and_leave(program: Callable[[], None]) -> NoReturn:
    """Call ``program`` and end this process, which is a fork, as Python ends after a script: report the error, call
    exit functions, and leave with the script's exit code."""
    code: int | str | None = 1
    try:
        program()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.last_value = error  # as Python does before it calls the hook
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        if not isinstance(code, int):
            if code is not None:
                print(code, file=sys.stderr)
            code = 0 if code is None else 1
        atexit._run_exitfuncs()  # os._exit does not
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
