"""Fetch a release of megatron-core from the package index into its own directory, and patch it:

    python scripts/core_tree.py RELEASE DIRECTORY

The package holds ``megatron/core`` only: enough for a training script of ours, not for
``pretrain_gpt.py``. It is unpacked, not installed, so that an installed megatron-core of
another version is left alone. scripts/setup.sh runs this script.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megatron_ext.checkout import apply, verify_hooks
from megatron_ext.checkout.tree import Tree
from megatron_ext.formats.errors import InputError


def obtain(version: str, into) -> Path:
    """The core-only tree of ``version`` at ``into``. It is fetched unless it is already there.

    The tree is complete or absent: it is unpacked next to ``into`` and renamed.

    Args:
        version: a release of megatron-core, e.g. ``0.16.1``.
        into: directory of the tree, which holds ``megatron/core`` afterwards.

    Raises:
        InputError: ``version`` is not a version, ``into`` holds something else, or the package cannot be fetched.
    """
    into = Path(into)
    if not re.fullmatch(r"\d+\.\d+\.\d+((rc|a|b)\d+)?", version):
        raise InputError("not a version of megatron-core, e.g. 0.16.1", field="version", value=version)
    if into.exists() and any(into.iterdir() if into.is_dir() else [into]):
        found = Tree(into).version
        if found != version:
            raise InputError(f"holds megatron-core {found}, not {version}", file=into)
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent) as scratch:
        wheel = download_wheel(version, Path(scratch, "wheel"))
        unpacked = Path(scratch, "tree")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        found = Tree(unpacked).version
        if found != version:
            raise InputError(f"the package says it is {found}", field="version", value=version)
        try:
            os.replace(unpacked, into)
        except OSError:  # another process was faster
            if Tree(into).version != version:
                raise
    return into


def download_wheel(version: str, scratch: Path) -> Path:
    """The wheel of ``version`` for this Python, or else for Python 3.11. Another Python can use all of that but the
    compiled index helper of datasets."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input"),
        *("--no-deps", "--only-binary=:all:", "--dest", str(scratch)),
        # Releases from 0.17 on require Python 3.12. Their core runs on 3.11 with one addition
        # that the CPU compatibility module makes.
        "--ignore-requires-python",
        f"megatron-core=={version}",
    ]
    for python in ([], ["--python-version", "3.11"]):
        result = subprocess.run([*command, *python], capture_output=True, text=True, check=False)
        if wheels := sorted(scratch.glob("*.whl")):
            break
    else:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else "pip failed"
        raise InputError(f"cannot be fetched: {reason}", field="megatron-core", value=version)
    return wheels[0]


def prepare(release: str, directory) -> Path:
    """Unpack and patch ``release`` in ``directory``. Does nothing if that is already done.

    Raises:
        InputError: the release is not supported or cannot be fetched, or a hook is not in its place.
    """
    if not (Path(directory) / "megatron").is_dir():
        print(f"unpacking megatron-core {release} into {directory}", file=sys.stderr)
    tree = obtain(release, directory)
    apply(tree)
    problems = verify_hooks(tree)
    if problems:
        raise InputError(f"{len(problems)} hooks are not in their place: {problems[0]}", file=tree)
    return tree


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python scripts/core_tree.py RELEASE DIRECTORY", file=sys.stderr)
        return 2
    try:
        prepare(sys.argv[1], sys.argv[2])
    except InputError as error:
        print(f"megatron-ext: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
