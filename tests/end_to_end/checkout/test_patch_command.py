"""The verb ``patch``: what it prints and how it ends, on a toy tree."""

import json
import subprocess
import sys

import pytest
import toy_megatron
from places import ROOT, pinned_core
from toy_megatron import append, snapshot

from megatron_ext.checkout import apply, revert
from megatron_ext.checkout.hook_table import DDP, HOOKS, MARKER, TRAINING
from megatron_ext.cli import main as cli


def test_the_command(archive, capsys):
    for verb, state in [("check", "clean"), ("apply", "applied"), ("check", "applied"), ("revert", "clean")]:
        assert cli.main(["patch", verb, str(archive), "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["state"] == state and state in err
    assert cli.main(["patch", "apply", str(archive), "--dry-run"]) == 0
    assert capsys.readouterr().out.count(MARKER) == len(HOOKS)
    assert cli.main(["patch", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    commits = {r["version"]: r["commit"] for r in listed["releases"]}
    assert len(listed["hooks"]) == len(HOOKS) and "0.16.1" in [r["version"] for r in listed["releases"]]
    assert cli.main(["patch", "list", str(archive)]) == 0
    text = capsys.readouterr().out
    assert "no known release has exactly this file" in text and f"main at {commits['main'][:10]}" in text
    assert cli.main(["patch", "apply", str(archive)]) == 0
    text = capsys.readouterr().out
    assert f"{len(HOOKS)} lines inserted into 6 files" in text and f"{DDP}: line 13 (a file of a known release)" in text
    assert cli.main(["patch", "apply", str(archive)]) == 0
    assert f"nothing was changed: all {len(HOOKS)} lines were there already" in capsys.readouterr().out
    assert cli.main(["patch", "revert", str(archive)]) == 0
    assert f"{len(HOOKS)} lines taken out" in capsys.readouterr().out
    append(archive, DDP, "\nclass DistributedDataParallel: ...\n")
    assert cli.main(["patch", "apply", str(archive), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and DDP in err


def test_checking_a_tree_that_is_not_as_it_should_be_ends_with_1(archive, capsys):
    apply(archive)
    (archive / DDP).write_text(toy_megatron.TEXTS[DDP])
    assert cli.main(["patch", "check", str(archive)]) == 1
    assert "drifted" in capsys.readouterr().out
    revert(archive)
    append(archive, DDP, "\nclass DistributedDataParallel: ...\n")
    assert cli.main(["patch", "check", str(archive)]) == 1
    assert "conflict" in capsys.readouterr().out


def protect(root):
    (root / TRAINING).chmod(0o444)


def windows(root):
    (root / DDP).write_bytes((root / DDP).read_bytes().replace(b"\n", b"\r\n"))


def half(root):
    apply(root)
    (root / DDP).write_text(toy_megatron.TEXTS[DDP])


def unknown(root):
    append(root, DDP, "\nclass DistributedDataParallel: ...\n")


def dangling(root):
    (root / DDP).unlink()
    (root / DDP).symlink_to("nowhere.py")


def no_tree(root):
    (root / "megatron/core/package_info.py").unlink()


@pytest.mark.parametrize(
    "spoil, names, advice",
    [
        (no_tree, "not a Megatron tree", "give the directory that holds megatron/core"),
        (
            unknown,
            "2 times class DistributedDataParallel in the module, lines 4, 17",
            "known are 0.10.0 to 0.19.0, and",
        ),
        (dangling, DDP, "is a link to nowhere.py, which does not exist"),
        (half, f"{len(HOOKS) - 1} of {len(HOOKS)} hook lines", "patch revert"),
        (protect, TRAINING, "chmod u+w"),
        (windows, DDP, "core.autocrlf"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(spoil, names, advice, archive, capsys):
    spoil(archive)
    before = snapshot(archive)
    assert cli.main(["patch", "apply", str(archive)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("megatron-ext: ")
    assert names in err and advice in err and snapshot(archive) == before


def test_set_up_finds_the_default_release():
    """It has no package of ours yet, so it reads the file by itself."""
    line = next(line for line in (ROOT / "scripts/setup.sh").read_text().split("\n") if line.startswith("than="))
    release = next(line for line in (ROOT / "scripts/setup.sh").read_text().split("\n") if line.startswith("release="))
    script = f"python={sys.executable}\n{line}\n{release}\necho $release"
    found = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, env={}, check=True)
    assert found.stdout.strip() == pinned_core()
