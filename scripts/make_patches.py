"""Write patches/ again from a git clone or mirror of Megatron-LM: python scripts/make_patches.py MIRROR

Every hook is placed by its structural description (megatron_ext/checkout/find_places.py), so a new
release needs a line in REFS and a run of this script. No text of Megatron is
written: patches have no context lines, and the manifest holds names, ids and line numbers.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import core_tree

from megatron_ext.checkout.find_places import find_gaps
from megatron_ext.checkout.hook_table import CORE_FILES, FILES, HOOKS
from megatron_ext.checkout.patchset import MANIFEST, SCHEMA_VERSION, Manifest, PatchedFile, Release, blob_id
from megatron_ext.checkout.verify import verify_text
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError

REFS = {
    version: f"core_v{version}"
    for version in (
        "0.10.0 0.11.0 0.12.0 0.12.1 0.12.2 0.12.3 0.13.0 0.13.1 0.14.0 "
        "0.15.0 0.15.1 0.15.2 0.15.3 0.16.0 0.16.1 0.17.0 0.17.1 0.18.0 0.18.2 0.19.0"
    ).split()
} | {"main": "main"}
"""Version -> ref. Release candidates (rc) have no patch; hooks are placed by the syntax tree."""

MODE = "100644"


def git(mirror: Path, *arguments: str) -> bytes:
    """Output of one git command; its error text goes to standard error."""
    return subprocess.run(["git", "-C", str(mirror), *arguments], check=True, stdout=subprocess.PIPE).stdout


def patch_file(path: str, before: bytes) -> tuple[str, PatchedFile]:
    """The patch text of one file, and its manifest entry."""
    gaps = sorted(find_gaps(path, before.decode()), key=lambda gap: gap.chosen)
    rows = before.decode().split("\n")
    for gap in reversed(gaps):
        rows.insert(gap.chosen, gap.line)
    after = "\n".join(rows)
    problems = verify_text(path, after)
    assert not problems, problems
    ids = blob_id(before), blob_id(after.encode())
    text = [f"diff --git a/{path} b/{path}", f"index {ids[0]}..{ids[1]} {MODE}", f"--- a/{path}", f"+++ b/{path}"]
    numbers = {}
    for shift, gap in enumerate(gaps, start=1):
        numbers[gap.hook.name] = gap.chosen + shift
        text += [f"@@ -{gap.chosen},0 +{gap.chosen + shift} @@", f"+{gap.line}"]
    return "\n".join(text) + "\n", PatchedFile(path, *ids, numbers)


def make_release(mirror: Path, version: str, ref: str) -> tuple[Release, str]:
    """One release's manifest entry and the text of its patch."""
    commit = git(mirror, "rev-parse", f"{ref}^{{commit}}").decode().strip()
    texts, entries = [], []
    for path in FILES:
        text, entry = patch_file(path, git(mirror, "cat-file", "blob", f"{ref}:{path}"))
        texts.append(text)
        entries.append(entry)
    name = f"{ref}.patch"
    return Release(version, ref, commit, name, entries), "".join(texts)


def compare_package(release: Release, folder: Path) -> bool | None:
    """Whether the package's core files equal the tag's; None if there is no such package."""
    try:
        tree = core_tree.obtain(release.version, folder / release.version)
    except InputError:
        return None
    ids = {f.path: f.preimage for f in release.files}
    return all(blob_id((tree / path).read_bytes()) == ids[path] for path in CORE_FILES)


def main() -> int:
    """Write patches/ and print one line per release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mirror", type=Path, help="git clone or mirror of Megatron-LM with its tags")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "patches")
    parser.add_argument("--packages", type=Path, help="compare with the packages; keep them in this directory")
    options = parser.parse_args()
    # Releases that are not compared again keep the result of the earlier comparison.
    known = json_files.load(options.out / MANIFEST, Manifest).releases if (options.out / MANIFEST).exists() else []
    compared = {(r.version, r.commit): r.same_core_on_pypi for r in known}
    releases, written = [], {}
    for version, ref in REFS.items():
        release, text = make_release(options.mirror, version, ref)
        if text in written:  # the same files as in an earlier release
            release.patch = written[text]
        else:
            written[text] = release.patch
            json_files.write_atomically(options.out / release.patch, text.encode())
        releases.append(release)
        release.same_core_on_pypi = compared.get((version, release.commit))
        if options.packages:
            release.same_core_on_pypi = compare_package(release, options.packages)
        count = sum(len(f.lines) for f in release.files)
        print(f"{version}: {count} lines in {len(release.files)} files, {release.patch}")
    manifest = Manifest(SCHEMA_VERSION, "patch_manifest", list(HOOKS), releases)
    json_files.save(options.out / MANIFEST, manifest, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
