"""A program in a session of its own: all its processes are ended together, and say before where their threads are. It
ends with this process, however that ends.

Stacks are those that faulthandler writes when a process is aborted (PYTHONFAULTHANDLER): it needs neither the
interpreter's lock nor a main thread that runs. Where py-spy is installed native frames are asked for first.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron_ext.formats.end_with_parent import end_with_parent

PROCESS_CHARACTERS = 8_000
"""Of the stacks of one process that are kept."""

NOISE = ("Extension modules:",)
"""Lines of faulthandler's that are left out."""

ABORT_SECONDS = 3.0
END_SECONDS = 30.0
"""Page-locked memory takes its time to be given back."""

PY_SPY_SECONDS = 20.0


class Member(NamedTuple):
    """A process of a session."""

    pid: int
    parent: int
    is_python: bool


class JobProcess:
    """One running program.

    Args:
        command, environment, cwd: as of :class:`subprocess.Popen`.
        log: file for what all its processes print.
    """

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path, log: Path):
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def members(self) -> list[Member]:
        """Living processes of the session, children before their parents."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                    program = os.path.basename(os.readlink(entry / "exe"))
                except OSError:  # it has ended, or is a zombie
                    continue
                if int(session) == self._process.pid and state != "Z":
                    found.append(Member(int(entry.name), int(parent), program.startswith("python")))
        return sorted(found, key=lambda member: (-_depth(member, found), member.pid))

    def stacks(self, seconds: float) -> str:
        """Stacks of all threads of all Python processes, which do not live on; native ones as far as ``seconds`` are
        enough."""
        members, texts = self.members(), []
        parents = {member.parent for member in members}
        for member in members:
            if member.pid in parents:  # it would end its children when it sees that one has ended
                _signal(member.pid, signal.SIGSTOP)
        pids = [member.pid for member in members if member.is_python]
        with ThreadPoolExecutor(len(members) or 1) as pool:  # symbols of PyTorch's libraries take their time
            found = pool.map(partial(_native_stacks, seconds=min(seconds, PY_SPY_SECONDS)), pids)
        for pid, native in zip(pids, found):
            command, text = _command(pid), _without_noise(native + _abort(pid))
            texts.append(f"process {pid}: {command}\n{text[:PROCESS_CHARACTERS]}")
        return "\n".join(texts)

    def kill(self) -> None:
        """End all processes of the session, and wait for that."""
        deadline = time.monotonic() + END_SECONDS
        while (members := self.members()) and time.monotonic() < deadline:
            for member in members:
                _signal(member.pid, signal.SIGKILL)
            self.poll()
            time.sleep(0.05)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that does not let go of it must not hold us too
            self._process.wait(timeout=END_SECONDS)

    def said(self, characters: int = 12_000) -> str:
        """The end of what it printed."""
        return _without_noise(self.log.read_text(errors="replace"))[-characters:]


def _without_noise(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line and not line.startswith(NOISE))


def _depth(member: Member, members: list[Member]) -> int:
    parents = {one.pid: one.parent for one in members}
    depth, pid = 0, member.pid
    while (pid := parents.get(pid, 0)) and depth < len(members):
        depth += 1
    return depth


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "ended"


def _native_stacks(pid: int, seconds: float) -> str:
    """By py-spy, with C frames; empty where it is not installed or not allowed, or there is no time."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    program = shutil.which("py-spy", path=os.pathsep.join(places))
    if program is None or seconds <= 0:
        return ""
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _abort(pid: int) -> str:
    """End a process, which writes its stacks as it ends; what it wrote to its standard error since."""
    try:
        with open(f"/proc/{pid}/fd/2", "rb") as said:
            said.seek(0, os.SEEK_END)
            _signal(pid, signal.SIGABRT)
            _signal(pid, signal.SIGCONT)
            deadline = time.monotonic() + ABORT_SECONDS
            while _lives(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            return said.read().decode(errors="replace")
    except OSError as error:
        return f"no stacks: {error.strerror}\n"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
