"""How tests are arranged: a stranger finds those of a file by its name, and they call what users call."""

import ast
import configparser
import ctypes.util
import functools
import subprocess
from collections import Counter

import pytest
from places import ROOT
from trees import tree_of

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
UNIT_FILES = sorted((TESTS / "unit").rglob("test_*.py"))
TIERS = {"unit", "distributed", "end_to_end", "nightly"}
USING_THE_PACKAGE = ("benchmarks", "examples", "scripts")
"""A benchmark that reaches for a private member breaks, unseen, when that is renamed."""
BESIDE_THE_PACKAGE = {name: ROOT / name for name in ("benchmarks", "examples", "scripts")} | {"gpu": TESTS / "gpu"}
"""Directories of the project whose files have unit tests too, by their rooms there."""


OF_OTHERS = {"_replace", "_fields", "_version"}
"""Members of named tuples and tensors that have a leading underscore and are for everyone."""


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(tree: ast.AST) -> set[str]:
    """Names with a leading underscore that a file defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - OF_OTHERS


@functools.cache
def private_in_package() -> set[str]:
    paths = (ROOT / "megatron_ext").rglob("*.py")
    return set().union(*(private_names(tree_of(path)) for path in paths))


BY_NAME = {"setattr", "delattr", "getattr", "hasattr", "attrgetter", "patch", "patch.object"}
"""Functions that are told a member's name."""


def called(node: ast.Call) -> str:
    """The function's name; of ``mock.patch.object`` the last two parts."""
    parts = ast.unparse(node.func).split(".")
    return ".".join(parts[-2:]) if parts[-1] == "object" else parts[-1]


def reached(tree: ast.AST):
    """(line, name) of every private name of the package that a test reads, replaces or imports."""
    private = private_in_package()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            if not of_self(node):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_ext"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in private)
        elif isinstance(node, ast.Call):
            texts = (part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str))
            names = [name for name in texts if name.rpartition(".")[2] in private]
            if names and called(node) in BY_NAME:
                yield from ((node.lineno, name) for name in names)


USERS = [*FILES, *(path for folder in USING_THE_PACKAGE for path in sorted((ROOT / folder).rglob("*.py")))]


def test_private_members_of_the_package_are_left_alone():
    assert [(path, *found) for path in USERS for found in reached(tree_of(path))] == []


def test_a_private_member_is_seen():
    private = min(private_in_package())
    for text in (
        f"run.{private}()",
        f"from megatron_ext.x import {private}",
        f"monkeypatch.setattr(run, '{private}', 0)",
        f"mock.patch.object(run, '{private}')",
        f"getattr(run, '{private}')()",
    ):
        assert [name for _, name in reached(ast.parse(text))] == [private]


def test_unit_tests_are_named_after_the_file_that_they_test():
    """``tests/unit/ROOM/test_FILE.py``, perhaps with what it is about behind the name."""
    nameless = []
    for path in UNIT_FILES:
        room = path.relative_to(TESTS / "unit").parts[0]
        folder = BESIDE_THE_PACKAGE.get(room, ROOT / "megatron_ext" / room)
        name = path.stem.removeprefix("test_")
        files = {file.stem for file in folder.rglob("*.py")}
        if room != "project" and not any(name == stem or name.startswith(f"{stem}_") for stem in files):
            nameless.append(f"{path}: name it test_FILE.py or test_FILE_ABOUT.py, after a file of {folder}")
    assert nameless == []


def test_tests_lie_in_the_tiers():
    assert {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} <= TIERS


def run_by_ci() -> list[str]:
    """Files and directories that ``scripts/test.sh`` without arguments hands to pytest."""
    lines = (ROOT / "scripts" / "test.sh").read_text().replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("python -m pytest")]
    return [word for line in commands for word in line.split() if word.startswith("tests")]


def test_ci_runs_every_test_once_but_those_of_nightly():
    """What takes minutes and finds what the other tiers do not need to find lies in ``tests/nightly``."""
    places = [ROOT / place for place in run_by_ci()]
    for path in TESTS.rglob("test_*.py"):
        runs = sum(place == path or place in path.parents for place in places)
        nightly = path.relative_to(TESTS).parts[0] == "nightly"
        assert runs == (not nightly), f"{path.relative_to(ROOT)} is run {runs} times by scripts/test.sh"


def test_pytest_without_arguments_leaves_nightly_out():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "pytest.ini")
    assert {f"tests/{tier}" for tier in TIERS} - set(settings["pytest"]["testpaths"].split()) == {"tests/nightly"}


def test_no_two_files_of_tests_share_a_name():
    names = Counter(path.name for path in FILES if path.name not in ("conftest.py",))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_unit_test_cannot_start_a_process():
    with pytest.raises(AssertionError, match="starts a process"):
        subprocess.run(["true"])


def test_importing_torch_for_cuda_is_no_process_of_ours():
    """Within the first test of a worker that imports it, its libraries are looked for so."""
    assert ctypes.util.find_library("c")
