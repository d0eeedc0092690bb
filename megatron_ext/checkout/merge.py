"""Where may our lines go in this file? An exact match, or a three-way merge; nothing else.

A patch without context applies by line number to any file that is long enough, in the wrong
place and without complaint. So a file is patched only if git's blob id says it is the very file
the patch was made for, or if the tree's own history holds that file, as the common base from
which both the owner's changes and ours are merged. Either way ``verify.py`` has the last word.
"""

import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkout.patchset import Insertion, blob_id, insertions_by_blob, manifest
from megatron_ext.checkout.places import find_gaps
from megatron_ext.checkout.syntax import PlaceError
from megatron_ext.checkout.tree import Tree
from megatron_ext.checkout.verify import strip_hooks, verify_text

MAX_BASES = 3
"""How many recorded files are tried as a merge base, nearest first."""


@dataclass(frozen=True)
class Placed:
    """The patched text of one file. ``how`` is ``exact`` or ``merged``."""

    text: str
    how: str


@dataclass(frozen=True)
class Refused:
    """Why a file cannot be patched."""

    reason: str


def place_hooks(tree: Tree, file: str, text: str) -> Placed | Refused:
    """Patch ``text``, the present content of ``file`` without any of our lines."""
    insertion = insertions_by_blob().get((file, blob_id(text.encode())))
    if insertion is not None:
        patched = insertion.apply(text.encode()).decode()
        problems = verify_text(file, patched)
        assert not problems, f"our own patch misplaces a hook: {problems[0]}"
        return Placed(patched, "exact")
    try:
        find_gaps(file, text)
    except PlaceError as error:
        return Refused(str(error).removeprefix(f"{file} ") + _unknown_release(tree))
    bases = _bases(tree, file, text)
    if not bases:
        return Refused(_no_base(tree))
    reasons = []
    for insertion, base in bases[:MAX_BASES]:
        merged = _merge(text, base, insertion.apply(base).decode())
        if merged is None:
            reasons.append("local changes touch the lines where a hook goes")
        elif strip_hooks(merged) != text:
            reasons.append("merging would change more than our own lines")
        elif problems := verify_text(file, merged):
            reasons.append(f"{problems[0].hook or 'verification'}: {problems[0].message}")
        else:
            return Placed(merged, "merged")
    return Refused(reasons[0])


def _unknown_release(tree: Tree) -> str:
    """What to add where a hook's place is missing in a release that was never looked at."""
    versions = [release.version for release in manifest().releases]
    return "" if tree.version in versions else f" (megatron-core {tree.version} is none of the releases that are known: {versions[0]} to {versions[-1]})"


def _no_base(tree: Tree) -> str:
    versions = [release.version for release in manifest().releases]
    if tree.has_history():
        return (
            f"differs from every known release ({versions[0]} to {versions[-1]}), and the clone's "
            "history holds none of them to merge from; fetch the tag it was made from"
        )
    return (
        f"differs from every known release ({versions[0]} to {versions[-1]}), and without git "
        "history there is nothing to merge from; use a git clone, or an unchanged release"
    )


def _bases(tree: Tree, file: str, text: str) -> list[tuple[Insertion, bytes]]:
    """Recorded versions of ``file`` that the tree's history holds, nearest to ``text`` first."""
    lines = Counter(text.split("\n"))
    found = []
    for (path, blob), insertion in insertions_by_blob().items():
        if path == file and (data := tree.blob(blob)) is not None:
            other = Counter(data.decode().split("\n"))
            distance = ((lines - other) + (other - lines)).total()
            found.append((distance, len(found), insertion, data))
    return [(insertion, data) for _, _, insertion, data in sorted(found, key=lambda f: f[:2])]


def _merge(ours: str, base: bytes, theirs: str) -> str | None:
    """git's three-way merge; None where it sees a conflict."""
    with tempfile.TemporaryDirectory() as scratch:
        places = [Path(scratch, name) for name in ("ours", "base", "theirs")]
        for place, data in zip(places, (ours.encode(), base, theirs.encode()), strict=True):
            place.write_bytes(data)
        result = subprocess.run(
            ["git", "merge-file", "-p", "-q", *map(str, places)], capture_output=True, check=False
        )
    return result.stdout.decode() if result.returncode == 0 else None
