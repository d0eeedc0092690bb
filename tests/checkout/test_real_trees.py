"""The same on real trees: set MEGATRON_MIRROR to a git clone or mirror of Megatron-LM with its tags."""

import os
import random
import subprocess
from pathlib import Path

import pytest
from random_edits import EDITS, edit_files
from toy_megatron import git

from megatron_ext.checkout import apply, check, revert, verify_hooks
from megatron_ext.checkout.hook_table import FILES
from megatron_ext.checkout.patchset import blob_id, insertions_by_blob, manifest
from megatron_ext.checkout.verify import is_hook_line, strip_hooks
from megatron_ext.errors import InputError

MIRROR = os.environ.get("MEGATRON_MIRROR")

pytestmark = pytest.mark.skipif(not MIRROR, reason="MEGATRON_MIRROR is not set")


def read(ref: str) -> dict[str, str]:
    """The files that carry hooks, at one commit."""
    show = ["git", "-C", MIRROR, "cat-file", "blob"]
    return {f: subprocess.run([*show, f"{ref}:{f}"], check=True, stdout=subprocess.PIPE).stdout.decode() for f in FILES}


def write(root: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode())


def make_clone(root: Path, texts: dict[str, str]) -> Path:
    """A work tree of those files only, with the mirror's objects for history."""
    write(root, {**texts, "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 0\nPATCH = 0\n"})
    git(root, "init", "-q")
    objects = subprocess.run(
        ["git", "-C", MIRROR, "rev-parse", "--git-path", "objects"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (root / ".git/objects/info/alternates").write_text(str((Path(MIRROR) / objects).resolve()) + "\n")
    return root


def neighbours(text: str) -> list[tuple]:
    """Each hook line with the code before and after it."""
    rows = text.split("\n")
    code = [n for n, r in enumerate(rows) if r.strip() and not r.strip().startswith("#")]
    found = []
    for number in [n for n in code if is_hook_line(rows[n])]:
        before = [rows[n].strip() for n in code if n < number][-1:]
        after = [rows[n].strip() for n in code if n > number][:1]
        found.append((rows[number].strip(), before, after))
    return found


@pytest.mark.parametrize("ref", sorted({release.ref for release in manifest().releases}))
def test_every_release_by_its_exact_files(ref, tmp_path):
    texts = read(ref)
    write(tmp_path, {**texts, "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 0\nPATCH = 0\n"})
    assert {f.detail for f in apply(tmp_path).files} == {"exact"} and verify_hooks(tmp_path) == []
    revert(tmp_path)
    assert all((tmp_path / f).read_bytes().decode() == texts[f] for f in FILES)


@pytest.mark.parametrize("ref", ["core_v0.12.0rc2", "core_v0.14.0rc3", "core_v0.13.0rc2", "core_v0.15.0rc4"])
def test_a_candidate_that_no_patch_is_for_merges_in_a_clone(ref, tmp_path):
    texts = read(ref)
    clone = make_clone(tmp_path, texts)
    report = apply(clone)
    assert "merged" in {f.detail for f in report.files} and verify_hooks(clone) == []
    revert(clone)
    assert all((clone / f).read_bytes().decode() == texts[f] for f in FILES)


@pytest.mark.parametrize("ref", ["core_v0.10.0", "core_v0.16.1", "main"])
def test_random_edits(ref, tmp_path):
    texts = read(ref)
    clone = make_clone(tmp_path, texts)
    insertions = [insertions_by_blob()[f, blob_id(t.encode())] for f, t in texts.items()]
    hooked = {i.path: neighbours(i.apply(texts[i.path].encode()).decode()) for i in insertions}
    outcomes = {"merged": 0, "refused": 0}
    for seed in range(EDITS):
        edited = edit_files(random.Random(seed), texts, insertions)
        write(clone, edited)
        try:
            apply(clone)
        except InputError:
            outcomes["refused"] += 1
        else:
            outcomes["merged"] += 1
            assert verify_hooks(clone) == [], f"seed {seed}"
            for file in FILES:
                patched = (clone / file).read_bytes().decode()
                assert strip_hooks(patched) == edited[file], f"seed {seed}"
                for (line, *around), (now, *near) in zip(hooked[file], neighbours(patched), strict=True):
                    # An edit may have replaced the code on one side of a hook; never on both.
                    assert line == now and (around[0] == near[0] or around[1] == near[1]), f"seed {seed}"
            assert revert(clone).state == "clean"
        assert all((clone / f).read_bytes().decode() == edited[f] for f in FILES), f"seed {seed}"
    assert min(outcomes.values()) > 30, outcomes
    print(ref, outcomes)
    write(clone, texts)
    assert check(clone).state == "clean"
