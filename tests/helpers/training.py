"""Launch real training for tests: real processes, the real megatron-core, gloo."""

import os
import subprocess
import sys
from pathlib import Path

from places import MEGATRON, ROOT


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment with the patched Megatron tree first on the path."""
    path = os.pathsep.join([str(MEGATRON), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(extra or {})}


def run(command: list[str], *, env: dict[str, str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run a command from the project's root with its output captured as text."""
    return subprocess.run(command, cwd=ROOT, env=environment(env), capture_output=True, text=True, timeout=timeout)


def launch_training(
    options: list[str], nproc: int = 4, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess:
    """Run the example on ``nproc`` processes; ``options`` are its options."""
    return run(
        [
            sys.executable,
            "-m",
            "megatron_ext.cpubench.launcher",
            "--fork",
            "--nproc-per-node",
            str(nproc),
            "examples/pretrain_gpt_hybrid.py",
            *map(str, options),
        ],
        env=env,
        timeout=timeout,
    )


SMALL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "64",
    "--untie-embeddings-and-output-weights",
]
PP2_VP2_DP2 = [
    "--pipeline-model-parallel-size",
    "2",
    "--num-virtual-stages-per-pipeline-rank",
    "2",
    "--data-parallel-size",
    "2",
]
"""A small GPT, and the layout of the main job."""


def last_line(result: subprocess.CompletedProcess) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""


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
