"""The patch files and their manifest: which lines go where, in which exact file.

A patch inserts only and has no context lines, so it holds nothing of the file it is for. It
says nothing about where it may go, either: that is the work of the recorded blob ids.
"""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_ext.checkout.hook_table import MARKER
from megatron_ext.formats import json_files as files
from megatron_ext.formats.errors import InputError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


class PatchedFile(msgspec.Struct, forbid_unknown_fields=True):
    """One file of one release: git blob ids before and after, and each inserted line.

    ``lines`` maps the hook's name to its line number in the patched file.
    """

    path: str
    preimage: str
    postimage: str
    lines: dict[str, int]


class Release(msgspec.Struct, forbid_unknown_fields=True):
    """One release of Megatron-LM and the patch file that serves it.

    ``same_core_on_pypi`` says whether the package's core files are the tag's, byte for byte;
    None where the package was not compared or does not exist.
    """

    version: str
    ref: str
    commit: str
    patch: str
    files: list[PatchedFile]
    same_core_on_pypi: bool | None = None

    @property
    def name(self) -> str:
        """The version; of a branch, also the commit that is meant."""
        return f"{self.version} at {self.commit[:10]}" if self.ref == self.version else self.version


class HookEntry(msgspec.Struct, forbid_unknown_fields=True):
    """What one inserted line is for; the same for all releases."""

    name: str
    file: str
    text: str
    place: str
    purpose: str


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """``patches/manifest.json``."""

    schema_version: int
    kind: str
    hooks: list[HookEntry]
    releases: list[Release]


@dataclass(frozen=True)
class Insertion:
    """Our lines for one exact file: ``lines`` are (after line of the preimage, text)."""

    path: str
    preimage: str
    postimage: str
    lines: tuple[tuple[int, str], ...]

    def apply(self, data: bytes) -> bytes:
        """The postimage of ``data``, which must be the recorded preimage."""
        assert blob_id(data) == self.preimage, f"{self.path} is not the recorded file"
        rows = data.split(b"\n")
        for after, text in reversed(self.lines):
            rows.insert(after, text.encode())
        result = b"\n".join(rows)
        assert blob_id(result) == self.postimage, f"patch for {self.path} does not fit its manifest"
        return result


def blob_id(data: bytes) -> str:
    """The id git gives a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def directory() -> Path:
    """Where the patch files lie: beside the package in a checkout, inside it when installed."""
    here = Path(__file__).resolve()
    for place in (here.parents[2] / "patches", here.parents[1] / "patches"):
        if (place / MANIFEST).is_file():
            return place
    raise InputError("the patch files are missing; install megatron-ext again", file=MANIFEST)


@functools.cache
def manifest() -> Manifest:
    """The manifest, read once."""
    found = files.load(directory() / MANIFEST, Manifest)
    if found.kind != "patch_manifest" or found.schema_version != SCHEMA_VERSION:
        raise InputError("not a manifest of this version", file=directory() / MANIFEST)
    return found


def known_releases() -> str:
    """The releases that the patches were made for, in words."""
    names = [release.name for release in manifest().releases]
    return f"{names[0]} to {names[-2]}, and {names[-1]}"


@functools.cache
def read_patch(name: str) -> tuple[Insertion, ...]:
    """The insertions of one patch file, in the order of the file."""
    return parse_patch((directory() / name).read_text(), name)


def parse_patch(text: str, name: str) -> tuple[Insertion, ...]:
    """Parse a patch of the only form we write: insertions without context.

    Raises:
        InputError: the text is anything else; a patch that removes a line, or that has
            lines of the original file, is never applied.
    """
    insertions, path, lines, after, left = [], None, [], 0, 0
    ids: tuple[str, ...] = ()

    def close():
        if path is not None and len(ids) == 2:
            insertions.append(Insertion(path, *ids, tuple(lines)))

    for number, row in enumerate(text.splitlines(), start=1):
        if row.startswith("diff --git a/"):
            close()
            path, ids, lines = row.split(" b/", 1)[1], (), []
        elif match := re.fullmatch(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})( \d+)?", row):
            ids = match.groups()[:2]
        elif row.startswith(("--- ", "+++ ")) and left == 0:
            continue
        elif match := re.fullmatch(r"@@ -(\d+),0 \+\d+(?:,(\d+))? @@", row):
            after, left = int(match[1]), int(match[2] or 1)
        elif left and row.startswith("+") and row.endswith(MARKER):
            lines.append((after, row[1:]))
            left -= 1
        else:
            raise InputError("not an insert-only patch", file=name, field=f"line {number}")
    close()
    return tuple(insertions)


@functools.cache
def insertions_by_blob() -> dict[tuple[str, str], Insertion]:
    """Every known file: (path, preimage blob id) -> what to insert."""
    found = {}
    for release in manifest().releases:
        patch = {i.path: i for i in read_patch(release.patch)}
        for entry in release.files:
            insertion = patch[entry.path]
            ids = (insertion.preimage, insertion.postimage)
            assert ids == (entry.preimage, entry.postimage), f"{release.patch} and manifest differ"
            found[entry.path, entry.preimage] = insertion
    return found
