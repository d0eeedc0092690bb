"""The same on real trees: the releases of megatron-core on the package index, fetched once.

They hold what carries hooks in megatron/core; from 0.17 on, megatron/training as well. With
MEGATRON_MIRROR (a git clone or mirror of Megatron-LM with its tags) the tests run on the tags too,
which hold everything. ``conftest.py`` says at the end of a run what was left out.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from core_tree import obtain
from places import HELPERS, ROOT
from random_edits import EDITS, edit_files
from released import CANDIDATES, MIRROR, RELEASES
from toy_megatron import snapshot
from variations import some
from warm_python import finished

from megatron_ext.checkout import apply, check, revert, verify_hooks
from megatron_ext.checkout.hook_table import FILES, HOOKS
from megatron_ext.checkout.patchset import blob_id, known_files, manifest
from megatron_ext.checkout.place_hooks import place_hooks
from megatron_ext.checkout.verify import hook_numbers, is_hook_line, strip_hooks
from megatron_ext.formats.errors import InputError


def also_in_the_mirror(releases, tags) -> list[str]:
    """Names of trees to test: releases of the package index, and tags where there is a mirror."""
    return [*releases, *(tags if MIRROR else ())]


@pytest.fixture(scope="session")
def packages(request, tmp_path_factory) -> Path:
    """Directory with an unpacked tree of every release; kept in pytest's cache between runs."""
    cache = getattr(request.config, "cache", None)  # there is none with -p no:cacheprovider
    folder = tmp_path_factory.mktemp("megatron-core") if cache is None else cache.mkdir("megatron-core")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda version: obtain(version, folder / version), {*some(RELEASES, 4), *some(CANDIDATES, 1)}))
    return folder


def read_tag(ref: str) -> dict[str, str]:
    """The files that carry hooks, at one commit of the mirror."""
    show = ["git", "-C", MIRROR, "cat-file", "blob"]
    return {f: subprocess.run([*show, f"{ref}:{f}"], check=True, stdout=subprocess.PIPE).stdout.decode() for f in FILES}


def read_package(root: Path) -> dict[str, str]:
    """The files that carry hooks and are in a package."""
    return {f: (root / f).read_bytes().decode() for f in FILES if (root / f).is_file()}


def read(name: str, packages: Path) -> dict[str, str]:
    """The files of one tree that carry hooks: a version of the package, or a tag of the mirror."""
    return read_package(packages / name) if name[0].isdigit() else read_tag(name)


def write(root: Path, texts: dict[str, str]) -> None:
    for path, text in {**texts, "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 0\nPATCH = 0\n"}.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode())


def holds(root: Path, texts: dict[str, str]) -> bool:
    """Whether the files are these, byte for byte."""
    return all((root / f).read_bytes().decode() == text for f, text in texts.items())


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


TAGS = sorted({release.ref for release in manifest().releases})
CANDIDATE_TAGS = ["core_v0.12.0rc2", "core_v0.14.0rc3", "core_v0.13.0rc2", "core_v0.15.0rc4"]


@pytest.mark.parametrize("name", also_in_the_mirror(some(RELEASES, 2), TAGS))
def test_every_release(name, packages, tmp_path):
    tree, there = tmp_path / "tree", read(name, packages)
    if name[0].isdigit():
        shutil.copytree(packages / name, tree)
    else:
        write(tree, there)
    before = snapshot(tree)
    report = apply(tree)
    assert report.state == "applied" and {f.detail for f in report.files} == {"exact"} and verify_hooks(tree) == []
    assert set(report.absent) == set(FILES) - set(there)
    lines = sum(len(hook_numbers((tree / file).read_text())) for file in there)
    assert lines == sum(hook.file in there for hook in HOOKS)
    assert check(tree).state == "applied" and not apply(tree).changed
    assert revert(tree).state == "clean" and snapshot(tree) == before


@pytest.mark.parametrize("name", also_in_the_mirror(some(CANDIDATES, 1), CANDIDATE_TAGS))
def test_a_candidate_that_no_patch_is_for(name, packages, tmp_path):
    texts = read(name, packages)
    write(tmp_path, texts)
    assert "syntax tree" in {f.detail for f in apply(tmp_path).files} and verify_hooks(tmp_path) == []
    revert(tmp_path)
    assert holds(tmp_path, texts)


@pytest.mark.nightly
@pytest.mark.parametrize("name", also_in_the_mirror(["0.16.1"], ["core_v0.10.0", "core_v0.16.1", "main"]))
def test_random_edits(name, packages, tmp_path):
    """Every edit is patched with each hook between its old neighbours, or refused untouched."""
    texts, tree = read(name, packages), tmp_path
    write(tree, texts)
    # Of a release few, because its files are long; scripts/edited_checkouts.py makes hundreds.
    edits = EDITS // 20 if name[0].isdigit() else EDITS
    entries = [known_files()[f, blob_id(t.encode())] for f, t in texts.items()]
    hooked = {path: neighbours(place_hooks(path, text)[0]) for path, text in texts.items()}
    outcomes = {"placed": 0, "refused": 0}
    for seed in range(edits):
        edited = edit_files(random.Random(seed), texts, entries)
        write(tree, edited)
        try:
            apply(tree)
        except InputError:
            outcomes["refused"] += 1
        else:
            outcomes["placed"] += 1
            assert verify_hooks(tree) == [], f"seed {seed}"
            for file in texts:
                patched = (tree / file).read_bytes().decode()
                assert strip_hooks(file, patched) == edited[file], f"seed {seed}"
                for (line, *around), (now, *near) in zip(hooked[file], neighbours(patched), strict=True):
                    # An edit may have replaced the code on one side of a hook; never on both.
                    assert line == now and (around[0] == near[0] or around[1] == near[1]), f"seed {seed}"
            assert revert(tree).state == "clean"
        assert holds(tree, edited), f"seed {seed}"
    assert min(outcomes.values()) > edits // 8, outcomes
    print(outcomes)
    write(tree, texts)
    assert check(tree).state == "clean"


def test_a_release_that_does_not_exist(tmp_path, monkeypatch):
    # No index at all: pip fails at once, and its last line is the reason.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(InputError, match="cannot be fetched: .*megatron-core==0.99.0"):
        obtain("0.99.0", tmp_path / "core")
    assert not (tmp_path / "core").exists()


def test_an_optimizer_without_fp8_steps_without_the_engine(packages):
    """0.12 refuses every step where Transformer Engine is absent, and has imported by name what does."""
    code = (
        "from megatron_ext.megatron import cpu_compat; cpu_compat.install(); "
        "from megatron.core.optimizer.distrib_optimizer import quantize_param_shard as quantize; "
        "quantize([], [], [], None)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages / "0.12.3"), str(ROOT)])}
    result = finished([sys.executable, "-c", code], ROOT, environment, imported="torch")
    assert result.returncode == 0, result.stderr[-2000:]


def test_buckets_with_more_padding_than_megatrons(packages):
    """0.17.1 counts a buffer's gradients apart from its parameters; buckets of our own can need more of both."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages / "0.17.1"), str(ROOT)])}
    result = finished([sys.executable, str(HELPERS / "lay_out_buckets.py")], ROOT, environment, imported="torch")
    assert result.returncode == 0, result.stderr[-2000:]
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["after"] == 8 * 128 > said["before"] and said["buckets"] == [[1] * 6, [1] * 2] and said["kept"]
    assert said["refused"] == [
        "schedule.json: groups = '3.weight': this parameter of the model is in no group",
        "schedule.json: groups[5].parameters: mixes parameters of experts with others: those are sharded over other "
        "ranks",
        "schedule.json: groups[6].ranks = 2: in this run its parameters are sharded over 1 ranks",
    ]
