"""The manifest of the patches: which lines go where, in which exact file of which release."""

import functools
import hashlib
from pathlib import Path

import msgspec

from megatron_ext.formats import json_files as files
from megatron_ext.formats.errors import InputError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MARKER = "# megatron-ext"


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One inserted line.

    Attributes:
        name: its name in messages of ``check``, e.g. ``schedules.interleaved.begin``.
        file: path below the root of the Megatron tree.
        text: the statement, without indentation and marker. ``{microbatch}`` in it stands for a variable whose name
            differs between releases; the name is taken from the helper's signature.
        place: where it goes, in words; ``find_places.py`` has the same in code.
        purpose: why the line is there, for ``patch list``.
    """

    name: str
    file: str
    text: str
    place: str
    purpose: str

    def line(self, microbatch: str = "virtual_microbatch_id") -> str:
        """The inserted line without indentation and without a line end."""
        return f"{self.text.replace('{microbatch}', microbatch)}  {MARKER}"


class PatchedFile(msgspec.Struct, forbid_unknown_fields=True):
    """One file of one release: git blob ids before and after, and each inserted line.

    ``lines`` maps the hook's name to its line number in the patched file.
    """

    path: str
    preimage: str
    postimage: str
    lines: dict[str, int]


class Release(msgspec.Struct, forbid_unknown_fields=True):
    """One release of Megatron-LM and its patch file.

    ``same_core_on_pypi`` says whether the package's core files equal the tag's byte for byte;
    None if the package was not compared or does not exist.
    """

    version: str
    ref: str
    commit: str
    patch: str
    files: list[PatchedFile]
    same_core_on_pypi: bool | None = None

    @property
    def name(self) -> str:
        """The version; for a branch, also the commit."""
        return f"{self.version} at {self.commit[:10]}" if self.ref == self.version else self.version


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """``patches/manifest.json``."""

    schema_version: int
    kind: str
    hooks: list[Hook]
    releases: list[Release]


def blob_id(data: bytes) -> str:
    """The id that git gives a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def directory() -> Path:
    """Directory of the patch files: next to the package in a checkout, inside the package when installed."""
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
    """The releases that the patches were made for, as text."""
    names = [release.name for release in manifest().releases]
    return f"{names[0]} to {names[-2]}, and {names[-1]}"


@functools.cache
def known_files() -> dict[tuple[str, str], PatchedFile]:
    """Every file of every release: (path, git blob id) -> its entry in the manifest."""
    return {(entry.path, entry.preimage): entry for release in manifest().releases for entry in release.files}
