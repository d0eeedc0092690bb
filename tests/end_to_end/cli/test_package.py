"""Wheel and sdist hold what they need, and a wheel works where nothing of the repository is."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

NEEDED = (
    "patches/manifest.json",
    "patches/core_v0.16.0.patch",
    "cost/hardware/a100-nvlink.json",
    "py.typed",
    "cli/main.py",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """A wheel and an sdist, built of a copy: building writes into the tree."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("megatron_ext", "patches"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_wheel_and_sdist_hold_patches_and_sheets(built):
    wheel = zipfile.ZipFile(built[0]).namelist()
    with tarfile.open(built[1]) as file:
        sdist = file.getnames()
    for name in NEEDED:
        assert f"megatron_ext/{name}" in wheel
        inside = name if name.startswith("patches/") else f"megatron_ext/{name}"
        assert any(path.endswith(f"/{inside}") for path in sdist), name


def test_an_installed_wheel_knows_patches_and_sheets(built, tmp_path):
    zipfile.ZipFile(built[0]).extractall(tmp_path)  # what pip does with a wheel of Python alone
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "megatron_ext", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    version = said("--version")
    assert (
        version.startswith("megatron-ext ") and "commit" not in version and "patches for Megatron-LM 0.10.0" in version
    )
    assert "pretrain_gpt.py" in said("patch", "list")
    assert "a100-nvlink" in said("cost", "hardware")


def test_a_clone_says_its_commit():
    command = [sys.executable, "-m", "megatron_ext", "--version"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert head[:10] in found
