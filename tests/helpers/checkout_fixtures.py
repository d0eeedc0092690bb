"""A toy Megatron release, known to the patches for the length of a test."""

import importlib.util

import pytest
import toy_megatron
from places import ROOT
from released import MIRROR
from toy_megatron import git

from megatron_ext.checkout import place_hooks
from megatron_ext.checkout.hook_table import FILES


def pytest_terminal_summary(terminalreporter):
    """Say what of a Megatron checkout was run, and what was not."""
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", ())]
    names = [
        node.partition("::test_every_release[")[2].rstrip("]") for node in passed if "::test_every_release[" in node
    ]
    if not names:
        return
    say = terminalreporter.write_line
    terminalreporter.section("Megatron trees")
    say(f"patched, verified, reverted to the same bytes: {', '.join(names)}")
    if not MIRROR:
        say(
            "not run: the tags of Megatron-LM, with pretrain_gpt.py (MEGATRON_MIRROR=MIRROR bash scripts/test.sh "
            "tests/end_to_end/checkout)"
        )
    say(
        "not run: training by pretrain_gpt.py at every release (scripts/test_checkouts.sh MIRROR; see "
        "patches/TESTED.md)"
    )


def load_script(name: str):
    """A module of scripts/."""
    place = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def toy_entries():
    """(path, blob) -> entry of a manifest, for the files of the toy."""
    make_patches = load_script("make_patches")
    found = {}
    for path in FILES:
        _, entry = make_patches.patch_file(path, toy_megatron.TEXTS[path].encode())
        found[path, entry.preimage] = entry
    return found


@pytest.fixture
def toy_release(monkeypatch, toy_entries):
    """The toy is a release that the patches serve."""
    monkeypatch.setattr(place_hooks, "known_files", lambda: toy_entries)


@pytest.fixture
def archive(tmp_path, toy_release):
    """An unpacked release without history."""
    root = tmp_path / "archive"
    toy_megatron.write(root)
    return root


@pytest.fixture
def clone(archive):
    """The same as a git clone, for what git says of it."""
    for command in ("init -q", "add .", "commit -q -m toy"):
        git(archive, *command.split())
    return archive
