"""DeepSpeed in a folder of its own, runs/peers-packages, with .venv's torch. Part of peers.py.

Nothing is put into .venv, and no dependency is resolved, so no other torch can come along.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "peers-packages"
REQUIREMENTS = Path(__file__).with_name("peer_requirements.txt")


def install() -> Path:
    """The folder for PYTHONPATH, filled if it is not what peer_requirements.txt asks for.

    Raises:
        RuntimeError: pip failed; the end of what it said is in the message.
    """
    stamp = FOLDER / ".requirements"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        shutil.rmtree(FOLDER, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--target",
            str(FOLDER),
            "-r",
            str(REQUIREMENTS),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DS_BUILD_OPS": "0"}, cwd=ROOT)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise RuntimeError(
                f"DeepSpeed cannot be installed: {next((line for line in lines if 'ERROR' in line), lines[-1])}"
            )
        stamp.write_text(REQUIREMENTS.read_text())
    return FOLDER


def environment() -> dict[str, str]:
    """Variables with which a rank finds the packages, and builds what DeepSpeed builds under runs/."""
    return {
        "PYTHONPATH": f"{ROOT / '.megatron'}{os.pathsep}{install()}",
        "TORCH_EXTENSIONS_DIR": str(ROOT / "runs" / "peers-extensions"),
    }
