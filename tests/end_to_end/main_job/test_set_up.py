"""What the set-up takes from its environment, with stand-ins for the interpreters that it calls."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from places import ROOT

NAMES = ("pyproject.toml", "setup.py", "constraints.txt")

OF_VENV = """#!/bin/sh
case "$*" in
    *"-m pip"*) printf '%s\\n' "$PIP_FIND_LINKS" "$PIP_USER" "$PIP_TARGET" > "{log}" ;;
    *"import cuda.bindings"*) exit 1 ;;
    *'["cuda"]'*) echo 12 ;;
    *sysconfig*) echo "{folder}" ;;
esac
"""
"""PyTorch is for CUDA 12, and cuda-bindings is not there: the set-up calls pip for it."""

GIVEN = """#!/bin/sh
echo "$0" > "{log}"
exec {python} "$@"
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A tree in which everything else is installed, in a directory whose name has a space."""
    tree = tmp_path / "a tree"
    for name in (*NAMES, "scripts/setup.sh"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    pins = hashlib.sha256(b"".join((tree / name).read_bytes() for name in NAMES)).hexdigest()
    for name, text in {
        ".venv/bin/python": OF_VENV.format(log=tmp_path / "pip", folder=tree),
        ".venv/.megatron_ext_stamp": f"{pins} core\n",
        "my python": GIVEN.format(log=tmp_path / "given", python=sys.executable),
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
        (tree / name).chmod(0o755)
    return tree


def set_up(tree: Path, **more: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("WHEELS", "MEGATRON_PATH")}
    words = ["bash", "scripts/setup.sh"]
    return subprocess.run(words, cwd=tree, env={**environment, **more}, capture_output=True, text=True)


def test_the_interpreter_that_is_given_is_used(tree, tmp_path):
    done = set_up(tree, PYTHON=str(tree / "my python"))
    assert done.returncode == 0 and (tmp_path / "given").read_text().strip() == str(tree / "my python"), done.stderr


def test_no_other_interpreter_is_used_than_the_one_that_is_given(tree):
    """It may have another PyTorch than the one that sees the GPU, or none."""
    done = set_up(tree, PYTHON="/no/such/python")
    assert (done.returncode, done.stderr) == (2, "setup: no Python 3.10 or newer found (PYTHON = /no/such/python)\n")


def test_pip_installs_into_venv_from_wheels_in_any_directory(tree, tmp_path):
    wheels = tmp_path / "my wheels #1, 100%?"
    wheels.mkdir()
    done = set_up(tree, PYTHON=str(tree / "my python"), WHEELS=str(wheels), PIP_USER="1", PIP_TARGET="/elsewhere")
    assert done.returncode == 0, done.stderr
    links, user, target = (tmp_path / "pip").read_text().split("\n")[:3]
    assert unquote(urlsplit(links).path) == str(wheels) and " " not in links  # pip splits the variable at spaces
    assert (user, target) == ("0", "")


OVER_AN_IMAGE = """#!/bin/sh
case "$*" in
    *"-m pip"* | *core_tree* | *"import cuda.bindings"*) ;;
    *sysconfig*) echo "{folder}" ;;
    *) PYTHONPATH="{torch}" exec {python} "$@" ;;
esac
"""
"""An interpreter with the PyTorch of a directory; nothing is installed."""


def test_the_pytorch_of_the_interpreter_is_used_even_if_its_base_has_another(tree, tmp_path):
    """A venv over an image, with a newer PyTorch: a venv that is made from it has that of the image."""
    (tree / ".venv/.megatron_ext_stamp").unlink()
    for path, torch in ((".venv/bin/python", tmp_path / "image"), ("my python", tmp_path / "newer")):
        (torch / "torch").mkdir(parents=True)
        (torch / "torch/__init__.py").write_text("class cuda:\n    is_available = lambda: True\n")
        (tree / path).write_text(OVER_AN_IMAGE.format(folder=tmp_path, torch=torch, python=sys.executable))
    done = set_up(tree, PYTHON=str(tree / "my python"))
    assert done.returncode == 0 and "using the installed PyTorch" in done.stderr, done.stderr
    assert (tmp_path / "megatron_ext_torch.pth").read_text() == f"{tmp_path / 'newer'}\n"
