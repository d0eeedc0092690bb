"""Processes that are forks of one that has imported torch and megatron-core: that import takes 4 s of processor time.

:class:`WarmPython` runs ``python SCRIPT`` or ``python -m MODULE`` as :class:`subprocess.Popen` would, from there on.
What it runs must read the environment after its imports. Not for tests of starting, of command lines in /proc, or of
what is imported.
"""

import array
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import orderings
from places import ROOT

from megatron_ext.cpubench import allocator
from megatron_ext.cpubench.forked_rank import ForkedRank, import_for_forks, run_and_leave
from megatron_ext.launch.launcher import end_with_parent

IMPORTED = "parity_worker"
"""The module, beside this file, that imports what most programs need."""


def serve(listener: socket.socket) -> None:
    """Import :data:`IMPORTED`, then fork a process for every message, until all that have connected have ended."""
    import_for_forks(IMPORTED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks report by themselves and are reaped by the kernel
    ends = [listener, listener.accept()[0]]
    while len(ends) > 1:
        for end in select.select(ends, [], [])[0]:
            if end is listener:
                ends.append(listener.accept()[0])
                continue
            message, files, _, _ = socket.recv_fds(end, 1 << 20, 4)
            if not message:
                ends.remove(end)
            elif os.fork() == 0:
                _keep_code(ends, json.loads(message), *files)
            for file in files:
                os.close(file)


def _keep_code(ends: list[socket.socket], asked: dict, out: int, error: int, result: int) -> None:
    """Between server and program: write the program's number and its exit code, and end it when the test ends."""
    for end in ends:
        end.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = os.getppid()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(result)
        end_with_parent(parent)
        _run(asked, out, error)
    end_with_parent(server)
    os.write(result, array.array("i", [child]).tobytes())
    _, status = os.waitpid(child, 0)
    os.write(result, array.array("i", [os.waitstatus_to_exitcode(status)]).tobytes())
    os._exit(0)


def _run(asked: dict, out: int, error: int) -> None:
    def program() -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(error, 2)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update({**allocator.environment(), **asked["environment"]})
        sys.argv = asked["arguments"]
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            sys.path[0] = asked["cwd"]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")

    run_and_leave(program)


class WarmPython(ForkedRank):
    """One process; the first starts a server, which ends with the last process that has used it.

    Args:
        arguments: ``[SCRIPT, ...]`` or ``["-m", MODULE, ...]``.
        cwd, environment, stdout, stderr: as of :class:`subprocess.Popen`; files only.
    """

    folder: ClassVar[Path | None] = None
    """Where processes that share servers find them; None: a directory of this process alone."""
    _servers: ClassVar[dict[bool, socket.socket]] = {}

    def __init__(self, arguments: list[str], cwd: Path, environment: dict[str, str], stdout, stderr):
        self.returncode: int | None = None
        control = self._server(environment)
        self._result, theirs = os.pipe()
        asked = {"arguments": arguments, "cwd": str(cwd), "environment": environment}
        files = [stdout.fileno(), stderr.fileno(), theirs]
        socket.send_fds(control, [json.dumps(asked).encode()], files)
        os.close(theirs)
        self.pid = int.from_bytes(os.read(self._result, 4), sys.byteorder)
        assert self.pid, "the server has ended; it has said why"
        os.set_blocking(self._result, False)

    @classmethod
    def _server(cls, environment: dict[str, str]) -> socket.socket:
        strict = orderings.VARIABLE in environment  # what a test takes away is prepared at the import
        if strict not in cls._servers:
            if cls.folder is None:
                cls._own = tempfile.TemporaryDirectory()
                cls.folder = Path(cls._own.name)
            with (cls.folder / "warm.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                cls._servers[strict] = _connected(cls.folder / ("strict" if strict else "warm"), environment)
        return cls._servers[strict]

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                code = os.read(self._result, 4)
            except BlockingIOError:
                return None
            os.close(self._result)
            self.returncode = int.from_bytes(code, sys.byteorder, signed=True) if code else -signal.SIGKILL
        return self.returncode


def _connected(place: Path, environment: dict[str, str]) -> socket.socket:
    """A connection to the server that listens at ``place``; it is started where there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(place))
    except (FileNotFoundError, ConnectionRefusedError):  # none yet, or it has ended
        place.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(place))
            listener.listen()
            paths = [str(ROOT / "examples"), str(ROOT), environment.get("PYTHONPATH", "")]
            own = {**allocator.environment(), **environment, "PYTHONPATH": os.pathsep.join(paths)}
            command = [sys.executable, __file__, str(listener.fileno())]
            subprocess.Popen(command, env=own, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        connection.connect(str(place))
    return connection


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
