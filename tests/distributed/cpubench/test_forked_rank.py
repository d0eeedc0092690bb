"""Ranks that are forks of the launcher end, and are told of, as ranks that were started anew."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import ranks_command, run, run_warm
from variations import some

SCRIPT = """
import atexit, os, signal, sys
import beside
assert __name__ == "__main__" or "RANK" not in os.environ
if __name__ == "__main__":
    rank, how = int(os.environ["RANK"]), sys.argv[1]
    assert sys.stdin.read() == "" and os.environ["MALLOC_ARENA_MAX"] == "1"
    said = f"rank {rank} imported by the launcher: {beside.PROCESS == os.getppid()}\\n"
    atexit.register(os.write, 1, said.encode())
    if rank == 1:
        {"code": lambda: sys.exit(7), "text": lambda: sys.exit("it was text"), "error": lambda: 1 // 0,
         "hook": lambda: (setattr(sys, "excepthook", lambda *e: os._exit(9 if sys.last_value is e[1] else 8)),
                          1 // 0),
         "signal": lambda: os.kill(os.getpid(), signal.SIGSEGV), "well": lambda: None}[how]()
"""


def launch(tmp_path, how: str) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("import os; PROCESS = os.getpid()")
    return run_warm(ranks_command(str(script), [how], 2))


def test_ranks_find_imported_what_the_script_imports(tmp_path):
    done = launch(tmp_path, "well")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} imported by the launcher: True" for rank in range(2)]


@pytest.mark.parametrize(
    ("how", "said"),
    some(
        [
            ("error", "ZeroDivisionError"),
            ("signal", "was ended by SIGSEGV"),
            ("hook", "ended with exit code 9"),
            ("code", "ended with exit code 7"),
            ("text", "it was text"),
        ],
        2,
    ),
)
def test_a_rank_that_fails_is_named(tmp_path, how, said):
    done = launch(tmp_path, how)
    assert done.returncode == 1
    assert said in done.stderr and "launch: rank 1 " in done.stderr, done.stderr


@pytest.mark.nightly
def test_a_script_that_cannot_be_imported_fails_as_without_forking(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import nothing_of_this_name")
    launcher = [sys.executable, "-m", "megatron_ext.launch.launcher"]
    forked, anew = (run([*launcher, *options, "--nproc-per-node", "1", str(script)]) for options in (["--fork"], []))
    assert forked.returncode == anew.returncode == 1
    assert forked.stderr.splitlines()[:-1] == anew.stderr.splitlines()[:-1], "but for the process number"


def test_a_killed_launcher_takes_forked_ranks_along(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif __name__ == '__main__':\n    print(os.getpid(), flush=True); time.sleep(99)")
    command = [sys.executable, "-m", "megatron_ext.launch.launcher", "--fork", "--nproc-per-node", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        rank = int(launcher.stdout.readline())
        launcher.kill()
        assert launcher.stdout.read() == "", "read() ends once the rank has ended and closed the pipe"
    deadline = time.monotonic() + 100  # a process closes its files before it has ended
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{rank}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
