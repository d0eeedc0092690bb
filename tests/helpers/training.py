"""Launch real training for tests: real processes, the real megatron-core, gloo."""

import os
import subprocess
import sys
import time
from pathlib import Path

import faults
from cases import LAYOUTS
from places import MEGATRON, ROOT
from warm_python import IMPORTED, finished


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment with the patched Megatron tree first on the path, and what puts ``faults.py`` in."""
    path, extra = os.pathsep.join([str(MEGATRON), os.environ.get("PYTHONPATH", "")]), extra or {}
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | extra
    return {**os.environ, **own, **(faults.asked(extra[faults.VARIABLE], path) if faults.VARIABLE in extra else {})}


def run(command: list[str], *, env: dict[str, str] | None = None, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run a command from the project's root with its output captured as text."""
    return subprocess.run(command, cwd=ROOT, env=environment(env), capture_output=True, text=True, timeout=timeout)


def run_warm(command: list[str], *, timeout: float = 300, imported: str = IMPORTED) -> subprocess.CompletedProcess:
    """The same, from a process that has imported torch and Megatron, or ``torch`` alone."""
    return finished(command, ROOT, environment(), timeout, imported=imported)


def ranks_command(script: str, options: list[str], nproc: int = 4) -> list[str]:
    """The command that runs ``script`` on ``nproc`` ranks of this machine."""
    launcher = [sys.executable, "-m", "megatron_ext.launch.launcher", "--fork", "--nproc-per-node", str(nproc)]
    return [*launcher, script, *map(str, options)]


def verb(name: str, *words: object) -> list[str]:
    """The command ``megatron-ext NAME``. A text of several words is split into them; a path is one."""
    parts = (part for word in words for part in (word.split() if isinstance(word, str) else [str(word)]))
    return [sys.executable, "-m", "megatron_ext", name, *parts]


def launch_training(
    options: list[str], nproc: int = 4, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Run the example on ``nproc`` processes; ``options`` are its options."""
    command = ranks_command("examples/pretrain_gpt_hybrid.py", options, nproc)
    if env is None:
        return run_warm(command, timeout=timeout)
    return run(command, env=env, timeout=timeout)


SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split()
SMALL += ["--untie-embeddings-and-output-weights"]
PP2_VP2_DP2 = LAYOUTS["interleaved"]
"""A small GPT, and the layout of the main job."""


def stays_in_shared_memory(before: set[str], seconds: float = 10) -> set[str]:
    """What is new in /dev/shm since ``before``, and still there after so long: tests that run beside this one may have
    something there for a moment."""
    end, new = time.monotonic() + seconds, set(os.listdir("/dev/shm")) - before
    while new and time.monotonic() < end:
        time.sleep(0.2)
        new &= set(os.listdir("/dev/shm"))
    return new


def work_left(marker: Path) -> list[str]:
    """Command lines of processes that still mention ``marker``."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                text = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(marker) in text:
                found.append(text)
    return found
