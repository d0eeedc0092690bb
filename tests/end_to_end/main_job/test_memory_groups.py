"""scripts/pretrain_gpt_larger_than_memory.sh makes a cgroup of either version, and removes what a killed run left.

Directories stand in for the kernel's: there a new group has its files, and its directory can be removed with them.
"""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "pretrain_gpt_larger_than_memory.sh"


def make_group(root: Path) -> Path | None:
    environment = os.environ | {"CGROUPS": str(root), "LIMIT_MIB": "7"}
    done = subprocess.run(["bash", SCRIPT, "--make-group"], env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) if done.stdout else None


def own(root: Path, version: int) -> Path:
    """The group of this process, made as the kernel's would look."""
    key = "" if version == 2 else "memory"
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next((path for _, name, path in lines if name == key), "/").lstrip("/")
    group = root / path if version == 2 else root / "memory" / path
    group.mkdir(parents=True, exist_ok=True)
    (root / "cgroup.controllers" if version == 2 else group / "memory.limit_in_bytes").touch()
    return group


@pytest.mark.parametrize("version, file", [(2, "memory.max"), (1, "memory.limit_in_bytes")])
def test_a_group_has_the_limit(tmp_path, version, file):
    group = make_group(tmp_path) if own(tmp_path, version) else None
    assert group is not None and group.parent == own(tmp_path, version)
    assert (group / file).read_text() == f"{7 << 20}\n"


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_killed_script_left_is_removed_and_what_another_one_uses_is_not(tmp_path, version):
    parent = own(tmp_path, version)
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, used = (parent / f"larger-than-memory.{pid}" for pid in (ended.pid, os.getpid()))
    left.mkdir()
    used.mkdir()
    make_group(tmp_path)
    assert not left.exists() and used.exists()


def test_without_cgroups_there_is_none(tmp_path):
    assert make_group(tmp_path) is None
