"""The committed patches: insert-only, few lines, nothing of Megatron's text, and as the manifest says."""

import pytest

from megatron_ext.checkout.hook_table import FILES, HOOKS, MARKER
from megatron_ext.checkout.patchset import directory, insertions_by_blob, manifest, parse_patch, read_patch
from megatron_ext.formats.errors import InputError

WANTED = "0.10.0 0.11.0 0.12.3 0.13.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.0 main".split()
MAX_LINES = 20


def test_the_releases_people_run_are_served():
    assert set(WANTED) <= {release.version for release in manifest().releases}


def test_manifest_and_patches_agree():
    names = {hook.name: hook for hook in HOOKS}
    assert [(h.name, h.file, h.text, h.place, h.purpose) for h in manifest().hooks] == [
        (h.name, h.file, h.text, h.place, h.purpose) for h in HOOKS
    ]
    for release in manifest().releases:
        patch = {i.path: i for i in read_patch(release.patch)}
        assert tuple(patch) == tuple(f.path for f in release.files) == FILES
        for entry in release.files:
            insertion = patch[entry.path]
            assert (insertion.preimage, insertion.postimage) == (entry.preimage, entry.postimage)
            assert len(insertion.lines) == len(entry.lines)
            for shift, ((after, line), (name, number)) in enumerate(
                zip(insertion.lines, entry.lines.items(), strict=True), start=1
            ):
                assert number == after + shift and names[name].file == entry.path
                assert line.strip() in (
                    names[name].line(),
                    names[name].line("microbatch_id"),  # as 0.9 calls it
                )
        assert {n for f in release.files for n in f.lines} == set(names)
        assert sum(len(f.lines) for f in release.files) <= MAX_LINES
    assert len(insertions_by_blob()) == len({(f.path, f.preimage) for r in manifest().releases for f in r.files})


def test_every_patch_file_is_used_and_holds_only_our_lines():
    used = {release.patch for release in manifest().releases}
    assert used == {place.name for place in directory().glob("*.patch")}
    for name in used:
        rows = (directory() / name).read_text().splitlines()
        body = [r for r in rows if not r.startswith(("diff --git ", "index ", "--- a/", "+++ b/", "@@ -"))]
        assert body and all(row.startswith("+") and row.endswith(MARKER) for row in body)


GOOD = """diff --git a/x.py b/x.py
index {}..{} 100644
--- a/x.py
+++ b/x.py
@@ -3,0 +4 @@
+    hooks.call()  # megatron-ext
""".format("a" * 40, "b" * 40)


def test_a_patch_is_read():
    (insertion,) = parse_patch(GOOD, "x.patch")
    assert insertion.lines == ((3, "    hooks.call()  # megatron-ext"),)


@pytest.mark.parametrize(
    "old, new",
    [
        ("@@ -3,0 +4 @@", "@@ -3 +3 @@\n-    call()"),
        ("@@ -3,0 +4 @@", "@@ -3,1 +4,2 @@\n     context()"),
        ("  # megatron-ext", ""),
        ("+    hooks", " hooks"),
        ("a" * 40, "abcdef0"),
        ("+    hooks.call()  # megatron-ext\n", "+  a  # megatron-ext\n+  b  # megatron-ext\n"),
    ],
)
def test_any_other_patch_is_refused(old, new):
    assert old in GOOD
    with pytest.raises(InputError, match="not an insert-only patch"):
        parse_patch(GOOD.replace(old, new), "x.patch")
