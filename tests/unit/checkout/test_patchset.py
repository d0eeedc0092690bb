"""The committed patches: insert-only, few lines, nothing of Megatron's text, and as the manifest says."""

import msgspec
import pytest
from packaging.requirements import Requirement
from places import ROOT, pinned_core
from toy_megatron import TEXTS

from megatron_ext.checkout import place_hooks
from megatron_ext.checkout.hook_table import FILES, HOOKS
from megatron_ext.checkout.patchset import directory, known_files, manifest

WANTED = "0.10.0 0.11.0 0.12.3 0.13.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.0 main".split()
MAX_LINES = 20


def test_the_releases_people_run_are_served():
    assert set(WANTED) <= {release.version for release in manifest().releases}


def test_manifest_and_patches_agree():
    """A patch file holds the lines of the manifest, each inserted at its number, and nothing else."""
    names = {hook.name: hook for hook in HOOKS}
    for release in manifest().releases:
        assert tuple(entry.path for entry in release.files) == FILES
        rows = iter((directory() / release.patch).read_text().splitlines())
        for entry in release.files:
            assert next(rows) == f"diff --git a/{entry.path} b/{entry.path}"
            assert next(rows) == f"index {entry.preimage}..{entry.postimage} 100644"
            assert (next(rows), next(rows)) == (f"--- a/{entry.path}", f"+++ b/{entry.path}")
            for shift, (name, number) in enumerate(entry.lines.items(), start=1):
                assert next(rows) == f"@@ -{number - shift},0 +{number} @@" and names[name].file == entry.path
                line = next(rows)
                assert line[0] == "+" and line[1:].strip() in (
                    names[name].line(),
                    names[name].line("microbatch_id"),  # as 0.9 calls it
                )
        assert next(rows, None) is None
        assert {n for f in release.files for n in f.lines} == set(names)
        assert sum(len(f.lines) for f in release.files) <= MAX_LINES
    assert len(known_files()) == len({(f.path, f.preimage) for r in manifest().releases for f in r.files})


def test_every_patch_file_is_used():
    assert {release.patch for release in manifest().releases} == {place.name for place in directory().glob("*.patch")}


def test_a_file_of_a_release_becomes_what_the_manifest_says(toy_entries, monkeypatch):
    (path, blob), entry = next(iter(toy_entries.items()))
    text = TEXTS[path]
    assert place_hooks.place_hooks(path, text)[1] == "syntax tree"
    monkeypatch.setattr(place_hooks, "known_files", lambda: {(path, blob): entry})
    assert place_hooks.place_hooks(path, text)[1] == "exact"
    wrong = msgspec.structs.replace(entry, postimage="0" * 40)
    monkeypatch.setattr(place_hooks, "known_files", lambda: {(path, blob): wrong})
    with pytest.raises(AssertionError, match="not as the manifest says"):
        place_hooks.place_hooks(path, text)


def test_the_default_release_is_of_the_newest_series_that_the_interpreter_can_have():
    """Releases from 0.17 on have packages for Python 3.12 and newer only. Of a series, the newest: its core files are
    those of one that is served, which ``core_tree`` proves when it patches them."""
    series = sorted({tuple(map(int, r.version.split(".")[:2])) for r in manifest().releases if r.version != "main"})
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().split("\n") if "megatron-core" in line]
    for python, newest in (("3.10", (0, 16)), ("3.11", (0, 16)), ("3.12", series[-1]), ("3.13", series[-1])):
        (pin,) = [pin for pin in pins if pin.marker.evaluate({"python_version": python})]
        assert tuple(map(int, str(pin.specifier)[2:].split(".")[:2])) == newest
    assert pinned_core() in [str(pin.specifier)[2:] for pin in pins]
