"""Processes that are forks of one that has imported torch, or torch and megatron-core: that takes 2 or 4 s of processor
time.

:class:`WarmPython` runs ``python SCRIPT``, ``python -m MODULE`` or ``python -c CODE`` as :class:`subprocess.Popen`
would, from there on; :func:`warm_children` has the package start so what it starts.
What it runs must read the environment after its imports. Not for tests of starting, of command lines in /proc, or of
what is imported.
"""

import array
import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest import mock

import orderings
from places import ROOT

from megatron_ext.cpubench import allocator
from megatron_ext.cpubench.forked_rank import ForkedRank, import_for_forks, run_and_leave
from megatron_ext.formats.end_with_parent import end_with_parent

IMPORTED = "parity_worker"
"""The module, beside this file, that imports what most programs need. With ``torch`` alone a program may import another
Megatron, or none."""


def serve(listener: socket.socket, module: str) -> None:
    """Import ``module``, then fork a process for every message, until all that have connected have ended."""
    import_for_forks(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks report by themselves and are reaped by the kernel
    ends = [listener, listener.accept()[0]]
    while len(ends) > 1:
        for end in select.select(ends, [], [])[0]:
            if end is listener:
                ends.append(listener.accept()[0])
                continue
            message, files, _, _ = socket.recv_fds(end, 1 << 20, 8)
            if not message:
                ends.remove(end)
            elif os.fork() == 0:
                _keep_code(ends, json.loads(message), *files)
            for file in files:
                os.close(file)


def _keep_code(ends: list[socket.socket], asked: dict, result: int, *files: int) -> None:
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
        _run(asked, *files)
    end_with_parent(server)
    os.write(result, array.array("i", [child]).tobytes())
    _, status = os.waitpid(child, 0)
    os.write(result, array.array("i", [os.waitstatus_to_exitcode(status)]).tobytes())
    os._exit(0)


def _run(asked: dict, *files: int) -> None:
    def program() -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]  # above the numbers that are asked for
        for file, number in zip(high, (1, 2, *asked["pass_fds"])):
            os.dup2(file, number)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update({**allocator.rank_variables(), **asked["environment"]})
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
        sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = asked["arguments"]
        if sys.argv[0] in ("-m", "-c"):
            how, *sys.argv = sys.argv
            sys.path[0] = asked["cwd"]
            if how == "-m":
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                exec(sys.argv[0], {"__name__": "__main__"})
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")

    run_and_leave(program)


class WarmPython(ForkedRank):
    """One process; the first starts a server, which ends with the last process that has used it.

    Args:
        arguments: ``[SCRIPT, ...]``, ``["-m", MODULE, ...]`` or ``["-c", CODE, ...]``.
        cwd, environment, stdout, stderr, pass_fds: as of :class:`subprocess.Popen`; files or their numbers only.
        imported: see :data:`IMPORTED`.
    """

    folder: ClassVar[Path | None] = None
    """Where processes that share servers find them; None: a directory of this process alone."""
    _servers: ClassVar[dict[str, socket.socket]] = {}

    def __init__(self, arguments, cwd, environment: dict[str, str], stdout, stderr, *, pass_fds=(), imported=IMPORTED):
        self.returncode: int | None = None
        control = self.server(environment, imported)
        self._result, theirs = os.pipe()
        asked = {"arguments": arguments, "cwd": str(cwd), "environment": environment, "pass_fds": pass_fds}
        files = [file if isinstance(file, int) else file.fileno() for file in (stdout, stderr)]
        socket.send_fds(control, [json.dumps(asked).encode()], [theirs, *files, *pass_fds])
        os.close(theirs)
        self.pid = int.from_bytes(os.read(self._result, 4), sys.byteorder)
        assert self.pid, "the server has ended; it has said why"
        os.set_blocking(self._result, False)

    @classmethod
    def server(cls, environment: dict[str, str], imported: str) -> socket.socket:
        # What a test takes away is prepared at the import.
        name = "strict" if orderings.VARIABLE in environment else imported
        if name not in cls._servers:
            if cls.folder is None:
                cls._own = tempfile.TemporaryDirectory()
                cls.folder = Path(cls._own.name)
            with (cls.folder / "warm.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                cls._servers[name] = _connected(cls.folder / name, environment, imported)
        return cls._servers[name]

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                code = os.read(self._result, 4)
            except BlockingIOError:
                return None
            os.close(self._result)
            self.returncode = int.from_bytes(code, sys.byteorder, signed=True) if code else -signal.SIGKILL
        return self.returncode


def _connected(place: Path, environment: dict[str, str], imported: str) -> socket.socket:
    """A connection to the server that listens at ``place``; it is started where there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(place))
    except (FileNotFoundError, ConnectionRefusedError):  # none yet, or it has ended
        place.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(place))
            listener.listen()
            # Another's Megatron is not found beside a program's own.
            paths = [str(ROOT / "examples"), str(ROOT), *([environment["PYTHONPATH"]] if imported == IMPORTED else [])]
            own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
            own = {**allocator.rank_variables(), **environment, **own}
            command = [sys.executable, __file__, str(listener.fileno()), imported]
            subprocess.Popen(command, env=own, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        connection.connect(str(place))
    return connection


@contextlib.contextmanager
def warm_children(module: ModuleType, imported: str = IMPORTED, before: str = "") -> Iterator[None]:
    """Python modules that ``module`` of the package starts are forks, which run the code ``before`` first. They are no
    leaders of process groups."""

    def popen(command, **how):
        if command[0] != sys.executable:
            return subprocess.Popen(command, **how)
        files = (number if how[name] is None else how[name] for number, name in ((1, "stdout"), (2, "stderr")))
        arguments = command[1:]
        if before:
            code = f"{before}\nimport runpy\nrunpy.run_module({arguments[1]!r}, run_name='__main__', alter_sys=True)"
            arguments = ["-c", code, *arguments[2:]]
        kept = {"pass_fds": [*how["pass_fds"]], "imported": imported}
        return WarmPython(arguments, Path.cwd(), how["env"], *files, **kept)

    def run(command, *, env, pass_fds=(), **how):
        return finished(command, Path.cwd(), env, pass_fds=[*pass_fds], imported=imported)

    with mock.patch.object(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen, "run": run})):
        yield


def finished(command: list[str], cwd: Path, environment: dict[str, str], timeout: float = 300, **how):
    """As :func:`subprocess.run` with ``text`` and ``capture_output``; ``how``: as of :class:`WarmPython`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        process = WarmPython(command[1:], cwd, environment, out, error, **how)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), error.read())


if __name__ == "__main__":
    if sys.argv[1] == "run":  # FOLDER ARGUMENTS: for scripts, while a process that has connected runs
        WarmPython.folder = Path(sys.argv[2])
        sys.exit(WarmPython(sys.argv[3:], Path.cwd(), dict(os.environ), 1, 2, imported="torch").wait())
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
